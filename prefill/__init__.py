"""The prefill worker: computes prompts, draws their first tokens, holds their pages until they have been fetched."""

from typing import TYPE_CHECKING, Any

from prefill.config import PrefillConfig

if TYPE_CHECKING:
    from prefill.worker import PrefillWorker

__all__ = ["PrefillConfig", "PrefillWorker"]


def __getattr__(name: str) -> Any:
    """The worker needs torch, its settings do not: it is imported when it is asked for."""
    if name != "PrefillWorker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefill.worker import PrefillWorker

    return PrefillWorker
