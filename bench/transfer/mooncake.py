"""Mooncake's transfer engine over TCP, through its batch calls.

A batch call returns when the batch is complete. The target learns of it by a frame on a connection of the
application's, as the servers that use Mooncake do it.
"""

from __future__ import annotations

import time

import msgspec
from mooncake.engine import TransferEngine

from bench.errors import BenchError
from bench.transfer.contender import Role, Timing
from bench.transfer.memory import MappedMemory, Pages
from bench.transfer.notice import HOST, NoticeLine
from connector.transport.base import Op


class _Description(msgspec.Struct, frozen=True):
    engine_port: int
    address: int
    notice_port: int


class Mooncake:
    """One engine."""

    def __init__(self, role: Role, memory: MappedMemory) -> None:
        self._memory = memory.memory
        self._engine = TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise BenchError("the engine cannot be initialised")
        if self._engine.register_memory(self._memory.address, self._memory.length):
            raise BenchError(f"the engine refuses {self._memory.length} bytes at {self._memory.address:#x}")
        self._line = NoticeLine()
        self._initiator = role == "initiator"
        self._page_bytes = 0

    def describe(self) -> bytes:
        """See `Contender`."""
        return msgspec.msgpack.encode(_Description(self._engine.get_rpc_port(), self._memory.address, self._line.port))

    def connect(self, description: bytes) -> None:
        """See `Contender`."""
        if not self._initiator:
            self._line.accept()
            return
        described = msgspec.msgpack.decode(description, type=_Description)
        self._peer = f"{HOST}:{described.engine_port}"
        self._peer_address = described.address
        self._line.dial(described.notice_port)

    def prepare(self, page_bytes: int) -> None:
        """See `Contender`."""
        self._page_bytes = page_bytes

    def operate(self, op: Op, local: Pages, remote: Pages, notice: int | None) -> Timing:
        """See `Contender`."""
        page_bytes, engine = self._page_bytes, self._engine
        move = engine.batch_transfer_sync_read if op == "read" else engine.batch_transfer_sync_write
        started_ns = time.monotonic_ns()
        here = (self._memory.address + local.astype("int64") * page_bytes).tolist()
        there = (self._peer_address + remote.astype("int64") * page_bytes).tolist()
        code = move(self._peer, here, there, [page_bytes] * len(here))
        ended_ns = time.monotonic_ns()
        if code:
            raise BenchError(f"an operation failed with code {code}")
        if notice is not None:
            self._line.send(notice)
        return Timing(started_ns, ended_ns)

    def await_notice(self, number: int) -> int:
        """See `Contender`."""
        return self._line.await_number(number)
