"""The `Worker` service: what a worker is, and how it is doing. It answers from the event loop, never from the model's
thread, so that a long step does not look like a dead worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from rpc.v1 import worker_pb2, worker_pb2_grpc

NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answers from two functions that must not block."""

    def __init__(
        self,
        describe: Callable[[], worker_pb2.WorkerDescription],
        status: Callable[[], worker_pb2.WorkerStatus],
    ) -> None:
        self._describe = describe
        self._status = status

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerDescription:
        """See worker.proto."""
        return self._describe()

    async def Status(
        self, request: worker_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerStatus:
        """See worker.proto."""
        return self._status()
