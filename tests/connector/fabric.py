"""The scripted fabric: a transport within one process whose completions a test delays, reorders, repeats or loses.

Bytes really move, run by run, when the script says so, from and to the memory that was registered. Every write is
checked against the `Custody` of the memory that it goes to: a write after the blocks' ownership has ended is a
violation, whatever else happens. As with real hardware, neither an error nor a dead peer stops a write that is on its
way; only a fence does, and only when it has ended.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from connector.errors import OutOfBoundsError, PeerLostError, UnreachableError
from connector.transport.base import Completed, Event, Fenced, Memory, Op, PeerDown, Runs

Bytes = npt.NDArray[np.uint8]


def view(memory: Memory) -> Bytes:
    """The registered bytes themselves."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.length).from_address(memory.address))


class Custody:
    """Which bytes of one region may be written at the moment."""

    def __init__(self, length: int) -> None:
        self._owned = np.zeros(length, dtype=np.bool_)
        self.violations: list[str] = []

    def take(self, offset: int, length: int) -> None:
        """These bytes have an owner who expects writes."""
        assert not self._owned[offset : offset + length].any(), "two owners"
        self._owned[offset : offset + length] = True

    def give_back(self, offset: int, length: int) -> None:
        """Their owner has let go."""
        assert self._owned[offset : offset + length].all(), "given back twice"
        self._owned[offset : offset + length] = False

    def check(self, offset: int, length: int, what: str) -> None:
        """A write is about to happen."""
        if not self._owned[offset : offset + length].all():
            self.violations.append(f"{what} wrote bytes {offset} to {offset + length}, which nobody expected")


class Batch:
    """One posted batch, in the hands of the script."""

    def __init__(
        self,
        number: int,
        initiator: FabricTransport,
        peer: int,
        target: FabricTransport,
        op: Op,
        regions: tuple[int, int],
        runs: Runs,
        timeout_s: float,
    ) -> None:
        self.number = number
        self.initiator = initiator
        self.peer = peer
        self.target = target
        self.terminal = False
        self.lost = False
        self.timeout_s = timeout_s
        self._op = op
        self._regions = regions
        self._runs = runs
        self._moved = 0

    def move(self, count: int | None = None) -> None:
        """Move the next `count` runs (default: all that are left). Nothing moves once the batch is terminal."""
        if self.terminal:
            return
        left = len(self._runs.length) - self._moved
        for _ in range(left if count is None else min(count, left)):
            self._move_run(self._moved)
            self._moved += 1

    def succeed(self) -> None:
        """Move what is left, and report success."""
        self.move()
        self._end(None)

    def fail(self, error: str = "scripted error") -> None:
        """Stop, and report an error."""
        self._end(error)

    def lose(self) -> None:
        """Move what is left, and never report it."""
        self.move()
        self.lost = True
        self.drop()

    def drop(self) -> None:
        """It is no more: nothing moves, and nothing is reported."""
        self.terminal = True
        self.initiator.forget(self)

    def repeat(self) -> None:
        """Report once more what was reported."""
        assert self.terminal
        self.initiator.report(Completed(batch=self.number, error=None))

    def outlive(self) -> None:
        """Its time has passed: its peer is late. Nothing stops."""
        cause = f"batch {self.number} was not over within {self.timeout_s:g} s"
        self.initiator.mark_down(self.peer, cause, gone=False)

    def _end(self, error: str | None) -> None:
        if not self.terminal:
            self.terminal = True
            self.initiator.forget(self)
            self.initiator.report(Completed(batch=self.number, error=error))

    def _move_run(self, index: int) -> None:
        local = int(self._runs.local[index])
        remote = int(self._runs.remote[index])
        length = int(self._runs.length[index])
        here = view(self.initiator.regions[self._regions[0]])[local : local + length]
        there = view(self.target.regions[self._regions[1]])[remote : remote + length]
        if self._op == "read":
            self.initiator.check_write(self._regions[0], local, length, f"READ batch {self.number}")
            here[:] = there
        else:
            self.target.check_write(self._regions[1], remote, length, f"WRITE batch {self.number}")
            there[:] = here


class Fabric:
    """What connects the transports of one test. `automatic` batches complete as soon as they are posted, and with
    `automatic_fences` fences end as soon as they have begun."""

    def __init__(self, automatic: bool = True) -> None:
        self.automatic = automatic
        self.automatic_fences = True
        self.ends: dict[str, FabricTransport] = {}
        self.on_post: Callable[[Batch], None] = lambda batch: None

    def transport(self, name: str, custody: Custody | None = None) -> FabricTransport:
        """A new end; `custody` watches its first region."""
        self.ends[name] = FabricTransport(self, name, custody)
        return self.ends[name]

    @property
    def in_flight(self) -> list[Batch]:
        """Batches that are not terminal, in the order of posting per initiator."""
        return [batch for end in self.ends.values() for batch in end.in_flight]

    def kill(self, name: str, *, reported: bool = True) -> None:
        """The process of this end is gone; its peers hear of it, unless not `reported`. What it has posted may go on
        until its peer has fenced it; what its peers have posted goes on."""
        self.ends[name].alive = False
        if reported:
            for end in self.ends.values():
                end.report_down(name)


class FabricTransport:
    """One end. Implements `connector.transport.base.Transport`."""

    def __init__(self, fabric: Fabric, name: str, custody: Custody | None) -> None:
        self.name = name
        self.alive = True
        self.regions: list[Memory] = []
        self.in_flight: list[Batch] = []
        self._fabric = fabric
        self._custody = custody
        self._events: list[Event] = []
        self._readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._peers: list[tuple[str, Literal["up", "down", "being fenced", "fenced"]]] = []
        self._batches = 0
        self._closed = False
        self._fault: Exception | None = None

    # The seam

    def register(self, memory: Memory) -> int:
        """See the seam."""
        self.regions.append(memory)
        return len(self.regions) - 1

    def describe(self) -> bytes:
        """See the seam."""
        return msgspec.msgpack.encode((self.name, [memory.length for memory in self.regions]))

    def connect(self, description: bytes) -> int:
        """See the seam."""
        name, _ = msgspec.msgpack.decode(description, type=tuple[str, list[int]])
        end = self._fabric.ends.get(name)
        if end is None or not end.alive:
            raise UnreachableError(f"{name} is not on this fabric")
        self._peers.append((name, "up"))
        return len(self._peers) - 1

    def post(self, peer: int, op: Op, local_region: int, remote_region: int, runs: Runs, timeout_s: float) -> int:
        """See the seam."""
        name, state = self._peers[peer]
        if state != "up":
            raise PeerLostError(f"{name} is {state}")
        target = self._fabric.ends[name]
        for region, offsets in ((self.regions[local_region], runs.local), (target.regions[remote_region], runs.remote)):
            if np.any(offsets < 0) or np.any(offsets + runs.length > region.length):
                raise OutOfBoundsError(f"a run leaves its region of {region.length} bytes")
        self._batches += 1
        batch = Batch(self._batches, self, peer, target, op, (local_region, remote_region), runs, timeout_s)
        self.in_flight.append(batch)
        if self._fabric.automatic:
            batch.succeed()
        self._fabric.on_post(batch)
        return batch.number

    def fileno(self) -> int:
        """See the seam."""
        return self._readable

    def poll(self) -> list[Event]:
        """See the seam."""
        if self._fault is not None:
            raise self._fault
        events, self._events = self._events, []
        if events:
            os.eventfd_read(self._readable)
        return events

    def fence(self, peer: int) -> None:
        """See the seam."""
        name, state = self._peers[peer]
        if state in ("up", "down"):
            self._peers[peer] = (name, "being fenced")
            if self._fabric.automatic_fences:
                self.finish_fence(peer)

    def close(self) -> None:
        """See the seam."""
        if not self._closed:
            self._closed = True
            self.alive = False
            for peer in range(len(self._peers)):
                self.fence(peer)
                self.finish_fence(peer)
            os.close(self._readable)

    # The script

    def report(self, event: Event) -> None:
        """Queue an event."""
        if not self._closed:
            if not self._events:
                os.eventfd_write(self._readable, 1)
            self._events.append(event)

    def finish_fence(self, peer: int) -> None:
        """A fence that has begun ends: nothing moves any more."""
        name, state = self._peers[peer]
        if state == "being fenced":
            for batch in [batch for batch in self.in_flight if batch.peer == peer]:
                batch.fail("fenced")
            theirs = self._fabric.ends[name]
            if not theirs.alive:  # a process that lives goes on writing, whatever this end does
                for batch in [batch for batch in theirs.in_flight if batch.target is self]:
                    batch.drop()
            self._peers[peer] = (name, "fenced")
            self.report(Fenced(peer=peer))

    def report_down(self, name: str) -> None:
        """The end called `name` has died."""
        for peer, (known, _) in enumerate(self._peers):
            if known == name:
                self.mark_down(peer, f"{name} was killed by the script", gone=True)

    def mark_down(self, peer: int, cause: str, *, gone: bool) -> None:
        """A peer cannot be used any more; reported once."""
        name, state = self._peers[peer]
        if state == "up":
            self._peers[peer] = (name, "down")
            self.report(PeerDown(peer=peer, cause=cause, gone=gone))

    def break_down(self, fault: Exception) -> None:
        """From now on every poll raises."""
        self._fault = fault
        os.eventfd_write(self._readable, 1)

    def forget(self, batch: Batch) -> None:
        """A batch has become terminal."""
        self.in_flight.remove(batch)

    def check_write(self, region: int, offset: int, length: int, what: str) -> None:
        """A write to this end's memory is about to happen."""
        if self._custody is not None and region == 0:
            self._custody.check(offset, length, what)
