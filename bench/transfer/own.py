"""The product's transports as contenders, and the baseline that they are measured against."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from bench.errors import BenchError
from bench.transfer.contender import DEADLINE_S, Role, Timing
from bench.transfer.memory import MappedMemory, Pages
from bench.transfer.notice import NoticeLine
from connector._native import copy_runs
from connector.transport.base import Completed, Op, Runs, Transport
from connector.transport.shm import ShmTransport
from connector.transport.tcp import TcpTransport
from connector.transport.ucx import UcxTransport


class _Description(msgspec.Struct, frozen=True):
    transport: bytes
    notice_port: int


def to_runs(local: Pages, remote: Pages, page_bytes: int) -> Runs:
    """A run for each page."""
    return Runs(
        local=local.astype(np.int64) * page_bytes,
        remote=remote.astype(np.int64) * page_bytes,
        length=np.full(len(local), page_bytes, dtype=np.int64),
    )


class TransportContender:
    """A `Transport` between two registered memories, awaited as the product awaits it: asleep on its descriptor."""

    def __init__(self, role: Role, memory: MappedMemory, transport: Transport) -> None:
        self._role = role
        self._transport = transport
        self._region = transport.register(memory.memory)
        self._line = NoticeLine()
        self._ready = select.poll()
        self._ready.register(transport.fileno(), select.POLLIN)
        self._page_bytes = 0
        self._peer = -1

    def describe(self) -> bytes:
        """See `Contender`."""
        return msgspec.msgpack.encode(_Description(self._transport.describe(), self._line.port))

    def connect(self, description: bytes) -> None:
        """See `Contender`. Only the initiator connects to the other's memory, as in the product."""
        if self._role == "target":
            self._line.accept()
            return
        described = msgspec.msgpack.decode(description, type=_Description)
        self._peer = self._transport.connect(described.transport)
        self._line.dial(described.notice_port)

    def prepare(self, page_bytes: int) -> None:
        """See `Contender`."""
        self._page_bytes = page_bytes

    def operate(self, op: Op, local: Pages, remote: Pages, notice: int | None) -> Timing:
        """See `Contender`."""
        started_ns = time.monotonic_ns()
        batch = self._post(op, to_runs(local, remote, self._page_bytes))
        self._await(batch)
        ended_ns = time.monotonic_ns()
        if notice is not None:
            self._line.send(notice)
        return Timing(started_ns, ended_ns)

    def await_notice(self, number: int) -> int:
        """See `Contender`."""
        return self._line.await_number(number)

    def _post(self, op: Op, runs: Runs) -> int:
        return self._transport.post(self._peer, op, self._region, self._region, runs, DEADLINE_S)

    def _await(self, batch: int) -> None:
        while True:  # as the product does: look first, then sleep
            for event in self._transport.poll():
                if not isinstance(event, Completed):
                    raise BenchError(f"the target was lost: {event}")
                if event.error is not None:
                    raise BenchError(f"an operation failed: {event.error}")
                if event.batch == batch:
                    return
            if not self._ready.poll(DEADLINE_S * 1e3):
                break
        raise BenchError(f"an operation was not complete after {DEADLINE_S:g} s")


class Memcpy:
    """Both memories mapped into one process, copied on the calling thread. It has no other side."""

    def __init__(self, memory: MappedMemory, other: MappedMemory) -> None:
        self._here, self._there = memory.memory, other.memory
        self._page_bytes = 0

    def describe(self) -> bytes:
        """See `Contender`."""
        return b""

    def connect(self, description: bytes) -> None:
        """See `Contender`."""

    def prepare(self, page_bytes: int) -> None:
        """See `Contender`."""
        self._page_bytes = page_bytes

    def operate(self, op: Op, local: Pages, remote: Pages, notice: int | None) -> Timing:
        """See `Contender`."""
        here, there = self._here, self._there
        started_ns = time.monotonic_ns()
        runs = to_runs(local, remote, self._page_bytes)
        if op == "read":
            copy_runs(here.address, here.length, there.address, there.length, runs.local, runs.remote, runs.length)
        else:
            copy_runs(there.address, there.length, here.address, here.length, runs.remote, runs.local, runs.length)
        return Timing(started_ns, time.monotonic_ns())

    def await_notice(self, number: int) -> int:
        """See `Contender`."""
        raise BenchError("memcpy has nobody to tell")


MAKERS: Final[dict[str, Callable[[Role, MappedMemory], TransportContender]]] = {
    "shm": lambda role, memory: TransportContender(role, memory, ShmTransport(f"bench-{role}")),
    "ucx": lambda role, memory: TransportContender(role, memory, UcxTransport(f"bench-{role}")),
    "tcp": lambda role, memory: TransportContender(role, memory, TcpTransport(f"bench-{role}")),
}
"""The product's transports by name; UCX with what UCX_TLS allows."""
