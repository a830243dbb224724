"""Which decode worker a request goes to.

Only workers that a probe has gone through take requests. Of those, the one that has not failed lately, and then the one
with the fewest requests of this gateway in flight. A worker that failed is asked again by a probe in the background,
and by requests when there is no other: nobody is shut out for good.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import grpc

from gateway.errors import ApiError, DecodeWorkerError, unavailable
from rpc.address import WorkerAddress
from rpc.channel import open_channel
from rpc.v1 import generate_pb2_grpc, worker_pb2, worker_pb2_grpc


class DecodeWorker:
    """One decode worker and what is known of it.

    `proven`: a whole generation has gone through it. `failures` counts those since it last answered.
    """

    def __init__(self, address: WorkerAddress, token: str, on_failure: Callable[[DecodeWorker], None]) -> None:
        self.name = address.name
        self.incarnation = address.incarnation
        self.in_flight = 0
        self.last_picked = 0
        self.proven = False
        self.failures = 0
        self.last_failure = ""
        self._on_failure = on_failure
        self._idle = asyncio.Event()
        self._idle.set()
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
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def answered(self) -> None:
        """It has drawn a token."""
        self.failures = 0

    def failed(self, error: ApiError) -> None:
        """A call failed that was no fault of the request's."""
        self.failures += 1
        self.last_failure = str(error)
        self._on_failure(self)

    async def retire(self) -> None:
        """Close once its calls have ended; each of them has its deadline."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Cancel its calls and close the channel."""
        await self._channel.close(None)


class Router:
    """The decode pool as this gateway sees it. All its workers serve one model."""

    def __init__(self, token: str, describe_timeout_s: float) -> None:
        self._token = token
        self._describe_timeout_s = describe_timeout_s
        self._described: dict[tuple[str, int], worker_pb2.WorkerDescription] = {}
        self._retiring: dict[DecodeWorker, asyncio.Task[None]] = {}
        self._turns = itertools.count(1)
        self.workers: list[DecodeWorker] = []
        self.on_failure: Callable[[DecodeWorker], None] = lambda worker: None

    @property
    def vocab_size(self) -> int:
        """Of the model. Raises `ApiError` 503 while there is no worker."""
        return min(one.vocab_size for one in self._all_described())

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt plus answer that every worker can take. Raises `ApiError` 503 while there is no worker."""
        return min(one.max_model_len for one in self._all_described())

    async def set(self, addresses: Sequence[WorkerAddress]) -> None:
        """Replace the pool. Workers that leave get no new calls and end those that they have.

        Raises:
            DecodeWorkerError: a new worker does not answer, or differs from the others; the pool is as it was.
        """
        known = {(worker.name, worker.incarnation): worker for worker in self.workers}
        wanted = {(address.name, address.incarnation): address for address in addresses}
        fresh = {
            key: DecodeWorker(address, self._token, lambda worker: self.on_failure(worker))
            for key, address in wanted.items()
            if key not in known
        }
        try:
            described = {key: self._described[key] for key in wanted if key in known}
            for key, worker in fresh.items():
                described[key] = await worker.describe(self._describe_timeout_s)
            _check_alike(list(described.values()))
        except BaseException:
            for worker in fresh.values():
                await worker.close()
            raise
        self._described = described
        self.workers = [known.get(key) or fresh[key] for key in wanted]
        for key, worker in known.items():
            if key not in wanted:
                self._retire(worker)

    def pick(self, tried: Collection[DecodeWorker] = ()) -> DecodeWorker:
        """The best worker that is not in `tried`. Raises `ApiError` 503 when there is none."""
        usable = self._usable(tried)
        if not usable:
            raise unavailable("no decode worker is ready; try again in a moment")
        picked = min(usable, key=lambda worker: (worker.failures > 0, worker.in_flight, worker.last_picked))
        picked.last_picked = next(self._turns)
        return picked

    def has_other(self, tried: Collection[DecodeWorker]) -> bool:
        """Whether `pick` has somebody left."""
        return bool(self._usable(tried))

    async def close(self) -> None:
        """Drop every worker."""
        workers, self.workers, self._described = self.workers, [], {}
        retiring = dict(self._retiring)
        await asyncio.gather(*(worker.close() for worker in (*workers, *retiring)))
        await asyncio.gather(*retiring.values())

    def _retire(self, worker: DecodeWorker) -> None:
        task = asyncio.create_task(worker.retire(), name=f"retiring {worker.name}")
        self._retiring[worker] = task
        task.add_done_callback(lambda _: self._retiring.pop(worker, None))

    def _usable(self, tried: Collection[DecodeWorker]) -> list[DecodeWorker]:
        return [worker for worker in self.workers if worker.proven and worker not in tried]

    def _all_described(self) -> list[worker_pb2.WorkerDescription]:
        if not self._described:
            raise unavailable("no decode worker is connected yet; try again in a moment")
        return list(self._described.values())


def _check_alike(described: Sequence[worker_pb2.WorkerDescription]) -> None:
    for one in described[1:]:
        for field in ("model", "dtype", "vocab_size"):
            if getattr(one, field) != getattr(described[0], field):
                raise DecodeWorkerError(
                    f"decode workers differ in {field}: {described[0].engine_id.name} has "
                    f"{getattr(described[0], field)}, {one.engine_id.name} has {getattr(one, field)}; "
                    "start all of them with one model and the same settings"
                )
