"""The one thread that drives NIXL's transfers.

NIXL has no descriptor that tells of a completion, so somebody has to ask; and on the same host the asking is what
copies the bytes, with the interpreter lock released. One thread asks for all peers of a transport, so that posting
never waits for a copy and no agent is entered by two threads.

An error of NIXL says nothing about the rest of its batch, and releasing a transfer does not stop it. The only proof
that nothing touches memory any more is that the peer's agent, and its UCX worker with it, has been destroyed. So
every batch that did not finish completes after that, and not before.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from connector.errors import TransportError
from connector.transport.base import Completed, Op
from connector.transport.nixl_agent import Agent

Descriptors = npt.NDArray[np.int64]

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch that is to be started. Descriptors are rows of (address, length, 0); there is at least one.

    One that has not finished after `timeout_s` seconds takes its peer down: on another host, NIXL may never report a
    death.
    """

    number: int
    op: Op
    local: Descriptors
    remote: Descriptors
    timeout_s: float
    posted_at: float

    def late(self, now: float) -> str:
        """What to say of a batch that has taken too long; empty while it has not."""
        if now < self.posted_at + self.timeout_s:
            return ""
        num_bytes = int(self.local[:, 1].sum())
        return f"batch {self.number} (a {self.op} of {num_bytes} bytes) was not over within {self.timeout_s:g} s"


@dataclass(eq=False, kw_only=True)
class PeerAgent:
    """The agent that reaches one peer, and what is under way to it. Everything here belongs to the poller's thread."""

    number: int
    agent: Agent
    remote_name: str
    started: deque[tuple[Batch, int]] = field(default_factory=deque)
    """(batch, NIXL's handle), oldest first."""
    ended: str = ""
    """Why the agent is gone; empty while it is not."""
    stuck: str = ""
    """Why the agent cannot be destroyed; empty while it can."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The peer cannot be reached any more; its batches have completed."""

    peer: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What was asked for: the peer's agent has been destroyed, and its batches have completed."""

    peer: int


Told: TypeAlias = Completed | Failed | Ended


@dataclass(frozen=True)
class _End:
    cause: str
    over: threading.Event
    tell: bool


class Poller:
    """See the module. Every method may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: deque[Told] = deque()
        self._changed = threading.Condition()
        self._orders: deque[tuple[PeerAgent, Batch | _End]] = deque()
        self._stopping = self._closed = False
        running = threading.Event()
        # A daemon, because the interpreter waits for others before it runs what would stop this one.
        self._thread = threading.Thread(target=self._run, args=(running,), name=name, daemon=True)
        self._thread.start()
        running.wait()

    def fileno(self) -> int:
        """Readable while `drain` has something to return."""
        return self._fd

    def drain(self) -> list[Told]:
        """What has happened since the last call; never blocks."""
        if not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
        drained = []
        while self._events:
            drained.append(self._events.popleft())
        return drained

    def report(self, event: Told) -> None:
        """Have `drain` return `event`."""
        self._events.append(event)
        os.eventfd_write(self._fd, 1)

    def start(self, peer: PeerAgent, batch: Batch) -> None:
        """Start a batch; its `Completed` comes exactly once."""
        self._order(peer, batch)

    def end(self, peer: PeerAgent, cause: str, *, tell: bool = False) -> threading.Event:
        """Destroy the peer's agent. The event is set once its batches have completed, or it cannot be destroyed; with
        `tell`, `Ended` is reported in the first case."""
        over = threading.Event()
        self._order(peer, _End(cause, over, tell))
        return over

    def close(self, timeout_s: float) -> None:
        """Carry out what was ordered and end the thread; twice is harmless.

        Raises:
            TransportError: it has not ended in time.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransportError(f"{self._thread.name}: NIXL has not returned within {timeout_s:g} s")
        if not self._closed:
            self._closed = True
            os.close(self._fd)

    def _order(self, peer: PeerAgent, order: Batch | _End) -> None:
        with self._changed:
            self._orders.append((peer, order))
            self._changed.notify()

    def _run(self, running: threading.Event) -> None:
        Path("/proc/thread-self/comm").write_text(self._thread.name[:15], encoding="utf-8")
        running.set()
        busy: set[PeerAgent] = set()
        pause = SHORTEST_PAUSE_S
        while True:
            with self._changed:
                if not self._orders and not self._stopping:
                    self._changed.wait(pause if busy else None)
                orders, self._orders = self._orders, deque()
                stopping = self._stopping
            for peer, order in orders:
                self._carry_out(peer, order)
                busy.add(peer)
            moved = [self._advance(peer) for peer in busy]
            busy = {peer for peer in busy if peer.started and not peer.stuck}
            if stopping and not orders:
                return
            pause = SHORTEST_PAUSE_S if orders or any(moved) else min(2 * pause, LONGEST_PAUSE_S)

    def _carry_out(self, peer: PeerAgent, order: Batch | _End) -> None:
        if isinstance(order, _End):
            self._end(peer, order.cause)
            if order.tell and not peer.stuck:
                self.report(Ended(peer=peer.number))
            order.over.set()
        elif peer.ended or peer.stuck:
            self.report(Completed(batch=order.number, error=peer.ended or peer.stuck))
        else:
            self._start(peer, order)

    def _start(self, peer: PeerAgent, batch: Batch) -> None:
        if late := batch.late(time.monotonic()):  # its turn came too late
            self._fail(peer, late)
            self.report(Completed(batch=batch.number, error=late))
            return
        try:
            handle = peer.agent.start(batch.op, batch.local, batch.remote, peer.remote_name)
        except TransportError as error:
            self._fail(peer, str(error))
            self.report(Completed(batch=batch.number, error=str(error)))
        else:
            peer.started.append((batch, handle))

    def _advance(self, peer: PeerAgent) -> bool:
        """Complete what has finished; whether anything has. An error or a batch that is overdue ends the peer."""
        before = len(peer.started)
        try:
            self._complete_finished(peer)
        except TransportError as error:
            self._fail(peer, str(error))
        else:
            now = time.monotonic()
            late = next((why for batch, _ in peer.started if (why := batch.late(now))), "")
            if late:
                self._fail(peer, late)
        return len(peer.started) < before

    def _complete_finished(self, peer: PeerAgent) -> None:
        """Oldest first, up to one that has not finished."""
        while peer.started and peer.agent.finished(peer.started[0][1]):
            batch, handle = peer.started.popleft()
            self.report(Completed(batch=batch.number, error=None))
            peer.agent.release(handle)

    def _fail(self, peer: PeerAgent, cause: str) -> None:
        self.report(Failed(peer=peer.number, cause=cause))
        self._end(peer, cause)

    def _end(self, peer: PeerAgent, cause: str) -> None:
        if peer.ended:
            return
        with contextlib.suppress(TransportError):  # it is why the peer ends, or will not matter
            self._complete_finished(peer)
        try:
            peer.agent.destroy([handle for _, handle in peer.started])
        except TransportError as error:
            peer.stuck = str(error)
            return
        peer.ended = cause
        for batch, _ in peer.started:
            self.report(Completed(batch=batch.number, error=cause))
        peer.started.clear()
