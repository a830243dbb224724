"""NIXL: one-sided transfers through NVIDIA's transfer library and its UCX backend. Optional; never chosen by `auto`.

One agent serves: it has every region, is described to peers, and answers those that connect. Each peer that is
connected to gets another agent of its own, with the regions registered again, because NIXL neither stops a transfer nor
says when one has stopped; destroying the agent does both (see `connector.transport.nixl_poller`). The price is a
registration and a few dozen milliseconds for each peer.

On the same host the death of a peer's process is watched through a pidfd. On another host it shows when a transfer
fails or does not finish in time.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from typing import Annotated

import msgspec
import numpy as np

from connector._native import OutOfBounds, merged_runs
from connector.errors import OutOfBoundsError, PeerLostError, RegistrationError, TransportError, UnreachableError
from connector.transport.base import FENCE_TIMEOUT_S, Completed, Event, Fenced, Memory, Offsets, Op, PeerDown, Runs
from connector.transport.host import HostIdentity, this_host
from connector.transport.nixl_agent import Agent, Library
from connector.transport.nixl_poller import Batch, Descriptors, Ended, PeerAgent, Poller
from connector.transport.sealed import seal, unseal
from connector.transport.shm import start_time

Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
"""Beyond any real one, and the sum of two of them still fits into 64 bits."""


class _Region(msgspec.Struct, frozen=True):
    base: Address
    length: Address


class _Description(msgspec.Struct, frozen=True):
    version: str
    host: HostIdentity
    pid: int
    started: int
    agent: str
    metadata: bytes
    regions: tuple[_Region, ...]


class _Peer:
    """A peer, seen from the owner's thread. `pidfd` is None where its process cannot be watched."""

    def __init__(self, reached: PeerAgent, regions: tuple[_Region, ...], pidfd: int | None) -> None:
        self.reached = reached
        self.regions = regions
        self.pidfd = pidfd
        self.down = False
        self.fencing: threading.Event | None = None


class NixlTransport:
    """See the module, and `connector.transport.base.Transport`.

    Raises:
        RegistrationError: NIXL is not installed, cannot be loaded, or another UCX is in this process.
    """

    name = "nixl"

    def __init__(self, name: str) -> None:
        self._library = Library()
        self._owner = name
        try:
            self._serving = Agent(self._library, name, served=True)
        except TransportError as error:
            raise RegistrationError(f"{name}: {error}") from error
        self._poller = Poller(f"nixl-{name}")
        self._regions: list[Memory] = []
        self._peers: dict[int, _Peer] = {}
        self._next_peer = self._next_batch = 0
        self._by_pidfd: dict[int, int] = {}
        self._waiting = select.epoll()
        self._waiting.register(self._poller.fileno(), select.EPOLLIN)
        self._closed = False
        # Nothing touches memory any more when it goes, be it that the process ends.
        self._end = weakref.finalize(self, _end_all, self._poller, self._peers, self._serving)

    def register(self, memory: Memory) -> int:
        """See `Transport.register`. Peers that are connected already are not reached with it."""
        if self._closed:
            raise RegistrationError(f"{self._owner}: this transport is closed")
        try:
            self._serving.register(memory)
        except TransportError as error:
            raise RegistrationError(
                f"{self._owner}: memory at {memory.address:#x} ({memory.length} bytes) cannot be registered: {error}"
            ) from error
        self._regions.append(memory)
        return len(self._regions) - 1

    def describe(self) -> bytes:
        """See `Transport.describe`."""
        if self._closed:
            raise TransportError(f"{self._owner}: this transport is closed")
        pid = os.getpid()
        return seal(
            _Description(
                self._library.version,
                this_host(),
                pid,
                start_time(pid),
                self._serving.name,
                self._serving.metadata(),
                tuple(_Region(memory.address, memory.length) for memory in self._regions),
            )
        )

    def connect(self, description: bytes) -> int:
        """See `Transport.connect`."""
        if self._closed:
            raise UnreachableError(f"{self._owner}: this transport is closed")
        described = unseal(description, _Description, self.name)
        if described.version != self._library.version:
            raise UnreachableError(
                f"the peer uses NIXL {described.version}, this worker {self._library.version}; each brings a UCX of "
                "its own, install the same one on both"
            )
        with contextlib.ExitStack() as on_failure:
            pidfd = _watched(described)
            if pidfd is not None:
                on_failure.callback(os.close, pidfd)
            agent = self._agent_for(described)
            on_failure.pop_all()
        number = self._next_peer
        self._next_peer += 1
        reached = PeerAgent(number=number, agent=agent, remote_name=described.agent)
        self._peers[number] = _Peer(reached, described.regions, pidfd)
        if pidfd is not None:
            self._by_pidfd[pidfd] = number
            self._waiting.register(pidfd, select.EPOLLIN)
        return number

    def post(self, peer: int, op: Op, local_region: int, remote_region: int, runs: Runs, timeout_s: float) -> int:
        """See `Transport.post`."""
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be a positive number of seconds")
        known = self._peers.get(peer)
        if known is None or known.down:
            raise PeerLostError(f"peer {peer} is {'down' if known else 'fenced or unknown'}; connect to it again")
        if not 0 <= local_region < len(self._regions) or not 0 <= remote_region < len(known.regions):
            raise OutOfBoundsError(
                f"local region {local_region} of {len(self._regions)}, remote region {remote_region} of "
                f"{len(known.regions)}: there is no such region; nothing was posted"
            )
        local, remote = self._regions[local_region], known.regions[remote_region]
        try:
            rows = merged_runs(runs.local, runs.remote, runs.length, local.length, remote.length)
        except OutOfBounds as error:
            raise OutOfBoundsError(str(error)) from None
        number = self._next_batch
        self._next_batch += 1
        if len(rows) == 0:
            self._poller.report(Completed(batch=number, error=None))
        else:
            length = rows[:, 2]
            batch = Batch(
                number=number,
                op=op,
                timeout_s=timeout_s,
                posted_at=time.monotonic(),
                local=_descriptors(local.address + rows[:, 0], length),
                remote=_descriptors(remote.base + rows[:, 1], length),
            )
            self._poller.start(known.reached, batch)
        return number

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._waiting.fileno()

    def poll(self) -> list[Event]:
        """See `Transport.poll`."""
        events: list[Event] = []
        for event in self._poller.drain():
            if isinstance(event, Completed):
                events.append(event)
            elif isinstance(event, Ended):
                del self._peers[event.peer]
                events.append(Fenced(peer=event.peer))
            else:
                events.extend(self._lost(event.peer, event.cause, gone=False))
        if not self._closed:
            for fd, _ in self._waiting.poll(0):
                number = self._by_pidfd.get(fd)
                if number is not None:
                    cause = "its process has ended"
                    self._poller.end(self._peers[number].reached, cause)
                    events.extend(self._lost(number, cause, gone=True))
        return events

    def fence(self, peer: int) -> None:
        """See `Transport.fence`. It never ends if NIXL does not let go of the peer's agent."""
        known = self._peers.get(peer)
        if known is None or known.fencing is not None:
            return
        self._unwatch(known)
        known.down = True
        known.fencing = self._poller.end(known.reached, "the peer was fenced", tell=True)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as every:
            every.callback(self._serving.destroy)
            every.callback(self._poller.close, FENCE_TIMEOUT_S)
            every.callback(self._waiting.close)
            for peer in list(self._peers):
                every.callback(self._fenced, peer)
                self.fence(peer)
        self._end.detach()

    def _fenced(self, peer: int) -> None:
        """Wait for the end of a fence."""
        known = self._peers.get(peer)
        if known is None or known.fencing is None:
            return
        if not known.fencing.wait(FENCE_TIMEOUT_S):
            raise TransportError(f"{self._owner}: NIXL has not returned to peer {peer} within {FENCE_TIMEOUT_S:g} s")
        if known.reached.stuck:
            raise TransportError(f"{self._owner}: peer {peer} cannot be fenced: {known.reached.stuck}")

    def _agent_for(self, described: _Description) -> Agent:
        """An agent that reaches the described peer and no other."""
        try:
            agent = Agent(self._library, self._owner, served=False)
            try:
                for memory in self._regions:
                    agent.register(memory)
                agent.load(described.metadata)
            except BaseException:
                agent.destroy()
                raise
        except TransportError as error:
            raise UnreachableError(f"the peer cannot be reached over nixl: {error}") from error
        return agent

    def _lost(self, number: int, cause: str, *, gone: bool) -> list[Event]:
        """Only the end of its process proves that a peer writes no more; NIXL's errors do not."""
        known = self._peers.get(number)
        if known is None or known.down:
            return []
        known.down = True
        self._unwatch(known)
        return [PeerDown(peer=number, cause=cause, gone=gone)]

    def _unwatch(self, known: _Peer) -> None:
        if known.pidfd is None:
            return
        del self._by_pidfd[known.pidfd]
        self._waiting.unregister(known.pidfd)
        os.close(known.pidfd)
        known.pidfd = None


def _descriptors(address: Offsets, length: Offsets) -> Descriptors:
    """NIXL's rows of (address, length, device)."""
    return np.stack((address, length, np.zeros_like(length)), axis=1)


def _watched(described: _Description) -> int | None:
    """A pidfd of the described process, or None where its pid means nothing."""
    if described.host != this_host():
        return None
    try:
        pidfd = os.pidfd_open(described.pid)
        try:
            if start_time(described.pid) != described.started:
                raise UnreachableError(f"process {described.pid} is not the peer any more; it has ended")
        except BaseException:
            os.close(pidfd)
            raise
    except (OSError, ValueError, OverflowError) as error:
        raise UnreachableError(f"the peer's process {described.pid} cannot be watched: {error}") from error
    return pidfd


def _end_all(poller: Poller, peers: dict[int, _Peer], serving: Agent) -> None:
    for peer in peers.values():
        poller.end(peer.reached, "this process has ended")
    poller.close(FENCE_TIMEOUT_S)
    serving.destroy()
