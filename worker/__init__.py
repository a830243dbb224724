"""What prefill and decode workers have in common: a model, a page pool, a connector, a gRPC server."""

from worker.config import WorkerConfig
from worker.core import WorkerCore

__all__ = ["WorkerConfig", "WorkerCore"]
