"""What prefill and decode workers have in common: a model, a page pool, a connector, a gRPC server."""

from typing import TYPE_CHECKING, Any

from worker.config import WorkerConfig

if TYPE_CHECKING:
    from worker.core import WorkerCore

__all__ = ["WorkerConfig", "WorkerCore"]


def __getattr__(name: str) -> Any:
    """The core needs torch, the settings do not: it is imported when it is asked for."""
    if name != "WorkerCore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from worker.core import WorkerCore

    return WorkerCore
