"""The one narrow seam between the connector and whatever moves bytes.

A transport registers memory, describes it to a peer, connects, posts batches of one-sided READs or WRITEs given as
arrays, reports completions and peer deaths through one pollable descriptor, and can fence a peer. It knows no requests,
blocks or leases. Every transport passes `tests/connector/transport_conformance.py`.

Completions come through a descriptor rather than callbacks so that the interpreter is entered only when there is
something to tell, and on the owner's own loop: no native thread ever calls into Python.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Op = Literal["read", "write"]
Offsets: TypeAlias = npt.NDArray[np.int64]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """One region of this process's memory that peers may reach.

    `fd` is the memfd that backs it, or None where there is none (then transports that map it refuse it).
    """

    address: int
    length: int
    fd: int | None


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Byte runs of one batch: three int64 arrays of one length; offsets are relative to the regions' starts."""

    local: Offsets
    remote: Offsets
    length: Offsets

    @property
    def total_bytes(self) -> int:
        """Bytes that the batch moves."""
        return int(self.length.sum())


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """Every operation of a batch is terminal. `error` is None when all of them succeeded."""

    batch: int
    error: str | None


class PeerDown(msgspec.Struct, frozen=True, kw_only=True):
    """The peer can no longer be reached, or has not served a batch in time. Reported at most once of a peer. Batches to
    it still complete, each with an error, at the fence at the latest.

    `gone`: its process has ended, as far as the transport can tell. Otherwise it may be stopped or slow, come back, and
    write into this process's memory.
    """

    peer: int
    cause: str
    gone: bool


class Fenced(msgspec.Struct, frozen=True, kw_only=True):
    """No operation of the peer touches local memory any more. Comes once, after the `Completed` of all its batches."""

    peer: int


Event: TypeAlias = Completed | PeerDown | Fenced

FENCE_TIMEOUT_S = 10.0
"""How long a fence may take. After that nothing can be said of the memory, and the process has to end."""


class Transport(Protocol):
    """See the module. Calls come from one thread; none of them waits for a peer, but `close`."""

    name: str

    def register(self, memory: Memory) -> int:
        """Make `memory` reachable; returns its region number, counting from 0. Raises `RegistrationError`."""

    def describe(self) -> bytes:
        """Everything a peer's transport of the same name needs to reach every registered region."""

    def connect(self, description: bytes) -> int:
        """Prepare to reach the peer that gave `description`; returns a peer number. Raises `UnreachableError`."""

    def post(self, peer: int, op: Op, local_region: int, remote_region: int, runs: Runs, timeout_s: float) -> int:
        """Start a batch and return its number; its `Completed` comes exactly once. An empty batch completes too.

        When it has not completed after `timeout_s` seconds (more than 0), its peer is reported down with a cause that
        names the batch: a peer that has stopped would otherwise never be reported.

        Raises `OutOfBoundsError` before anything is posted when a run leaves its region, and `PeerLostError` when the
        peer is known to be down, or was told to be fenced.
        """

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to return."""

    def poll(self) -> list[Event]:
        """What has happened since the last call; never blocks."""

    def fence(self, peer: int) -> None:
        """Begin to tear the connection down by force, and return at once; `Fenced` is reported when it has been done.
        Fencing again, or a peer that is unknown, is harmless."""

    def close(self) -> None:
        """Fence every peer, wait for it, and give everything back. What this brings is there to be polled. Closing
        twice is harmless.

        Raises:
            TransportError: a fence takes longer than `FENCE_TIMEOUT_S`.
        """
