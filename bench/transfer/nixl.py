"""NIXL's UCX backend, used the fast way that its documentation shows.

Descriptor lists of all pages are prepared once for a page size; an operation names page ids, carries its notice in the
transfer itself, and is polled for without a pause on both sides, as NIXL offers no other way to wait. Polling is what
progresses both sides: its progress thread never sleeps, would be a third busy thread next to the two that poll, and
made NIXL slower wherever it was tried (two cores; up to twice for a WRITE).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import nixl_cu12
import numpy as np

from bench.errors import BenchError
from bench.transfer.contender import DEADLINE_S, Role, Timing
from bench.transfer.memory import MappedMemory, Pages
from connector.transport.base import Op

LOOKS_IN_A_ROW = 50
"""Between two questions whether the operation is over."""


class _Description(msgspec.Struct, frozen=True):
    metadata: bytes
    address: int


class Nixl:
    """One agent."""

    def __init__(self, role: Role, memory: MappedMemory) -> None:
        self._memory = memory.memory
        config = nixl_cu12.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl_cu12.nixl_agent(role, config)
        self._agent.register_memory([(self._memory.address, self._memory.length, 0, "")], "DRAM")
        self._initiator = role == "initiator"

    def describe(self) -> bytes:
        """See `Contender`."""
        return msgspec.msgpack.encode(_Description(self._agent.get_agent_metadata(), self._memory.address))

    def connect(self, description: bytes) -> None:
        """See `Contender`."""
        described = msgspec.msgpack.decode(description, type=_Description)
        self._peer = self._agent.add_remote_agent(described.metadata)
        self._peer_address = described.address

    def prepare(self, page_bytes: int) -> None:
        """See `Contender`."""
        if self._initiator:
            self._local = self._agent.prep_xfer_dlist("", self._pages(self._memory.address, page_bytes), "DRAM")
            self._remote = self._agent.prep_xfer_dlist(self._peer, self._pages(self._peer_address, page_bytes), "DRAM")

    def operate(self, op: Op, local: Pages, remote: Pages, notice: int | None) -> Timing:
        """See `Contender`. Giving the handle back is not counted."""
        message = b"" if notice is None else str(notice).encode()
        started_ns = time.monotonic_ns()
        deadline_ns = started_ns + int(DEADLINE_S * 1e9)
        transfer = self._agent.make_prepped_xfer(op.upper(), self._local, local, self._remote, remote, message)
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
            if time.monotonic_ns() > deadline_ns:
                raise BenchError(f"an operation was not complete after {DEADLINE_S:g} s")
        ended_ns = time.monotonic_ns()
        if state != "DONE":
            raise BenchError(f"an operation ended as {state}")
        transfer.release()
        return Timing(started_ns, ended_ns)

    def await_notice(self, number: int) -> int:
        """See `Contender`."""
        deadline_ns = time.monotonic_ns() + int(DEADLINE_S * 1e9)
        while time.monotonic_ns() < deadline_ns:
            for messages in self._agent.get_new_notifs().values():
                if str(number).encode() in messages:
                    return time.monotonic_ns()
        raise BenchError(f"no notice of operation {number} came within {DEADLINE_S:g} s")

    def serve(self, until: Callable[[], bool]) -> None:
        """See `Serving`: without a progress thread, looking for notices is what progresses the target."""
        while not until():
            for _ in range(LOOKS_IN_A_ROW):
                self._agent.get_new_notifs()

    def _pages(self, address: int, page_bytes: int) -> object:
        starts = address + np.arange(0, self._memory.length, page_bytes, dtype=np.uint64)
        return np.stack([starts, np.full_like(starts, page_bytes), np.zeros_like(starts)], axis=1)
