"""The decode worker: owns requests end to end, imports the pages of their prompts, draws their tokens."""

from typing import TYPE_CHECKING, Any

from decode.config import DecodeConfig

if TYPE_CHECKING:
    from decode.peers import PeerLink
    from decode.worker import DecodeWorker

__all__ = ["DecodeConfig", "DecodeWorker", "PeerLink"]


def __getattr__(name: str) -> Any:
    """The worker needs torch, its settings do not: it is imported when it is asked for."""
    if name not in {"DecodeWorker", "PeerLink"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from decode import peers, worker

    return worker.DecodeWorker if name == "DecodeWorker" else peers.PeerLink
