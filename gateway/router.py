"""Which decode worker a request goes to: the one with the fewest requests of this gateway in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from gateway.errors import DecodeWorkerError, unavailable
from rpc.address import WorkerAddress
from rpc.channel import open_channel
from rpc.v1 import generate_pb2_grpc, worker_pb2, worker_pb2_grpc


class DecodeWorker:
    """One decode worker and what it says of itself."""

    def __init__(self, address: WorkerAddress, token: str) -> None:
        self.name = address.name
        self.incarnation = address.incarnation
        self.in_flight = 0
        self._channel = open_channel(address.rpc, token)
        self.generate = generate_pb2_grpc.GenerateStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerStub(self._channel)

    async def describe(self, timeout_s: float) -> worker_pb2.WorkerDescription:
        """What it serves.

        Raises:
            DecodeWorkerError: it does not answer, or it is no decode worker.
        """
        try:
            described: worker_pb2.WorkerDescription = await self._worker.Describe(
                worker_pb2.DescribeRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise DecodeWorkerError(f"decode worker {self.name} does not answer: {error.details()}") from error
        if described.role != "decode":
            raise DecodeWorkerError(f"{self.name} is a {described.role} worker; the gateway calls decode workers")
        return described

    async def status(self, timeout_s: float) -> worker_pb2.WorkerStatus | None:
        """How it is doing; None when it does not say so in time."""
        try:
            status: worker_pb2.WorkerStatus = await self._worker.Status(worker_pb2.StatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return None
        return status

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One request in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """Cancel its calls and close the channel."""
        await self._channel.close(None)


class Router:
    """The decode pool as this gateway sees it. All its workers serve one model with one context length."""

    def __init__(self, token: str, describe_timeout_s: float) -> None:
        self._token = token
        self._describe_timeout_s = describe_timeout_s
        self._described: worker_pb2.WorkerDescription | None = None
        self.workers: list[DecodeWorker] = []

    @property
    def described(self) -> worker_pb2.WorkerDescription:
        """What the workers serve. Raises `ApiError` 503 while there is none."""
        if self._described is None:
            raise unavailable("no decode worker is connected yet; try again in a moment")
        return self._described

    async def set(self, addresses: Sequence[WorkerAddress]) -> None:
        """Replace the pool. Workers that stay keep their calls.

        Raises:
            DecodeWorkerError: a new worker does not answer, or differs from the others; the pool is as it was.
        """
        known = {(worker.name, worker.incarnation): worker for worker in self.workers}
        wanted = {(address.name, address.incarnation): address for address in addresses}
        fresh = {key: DecodeWorker(address, self._token) for key, address in wanted.items() if key not in known}
        try:
            described = [await worker.describe(self._describe_timeout_s) for worker in fresh.values()]
            self._described = _common([*([self._described] if self._described and known else []), *described])
        except BaseException:
            for worker in fresh.values():
                await worker.close()
            raise
        self.workers = [known.get(key) or fresh[key] for key in wanted]
        for key, worker in known.items():
            if key not in wanted:
                await worker.close()

    def pick(self) -> DecodeWorker:
        """The least busy worker. Raises `ApiError` 503 when there is none."""
        if not self.workers:
            raise unavailable("no decode worker is connected; try again in a moment")
        return min(self.workers, key=lambda worker: worker.in_flight)

    async def close(self) -> None:
        """Drop every worker."""
        workers, self.workers = self.workers, []
        for worker in workers:
            await worker.close()


def _common(described: Sequence[worker_pb2.WorkerDescription]) -> worker_pb2.WorkerDescription | None:
    for one in described[1:]:
        for field in ("model", "dtype", "max_model_len", "vocab_size"):
            if getattr(one, field) != getattr(described[0], field):
                raise DecodeWorkerError(
                    f"decode workers differ in {field}: {described[0].engine_id.name} has "
                    f"{getattr(described[0], field)}, {one.engine_id.name} has {getattr(one, field)}"
                )
    return described[0] if described else None
