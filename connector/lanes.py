"""The transports of one worker behind one door: who posts is told of its completions, everyone of a lost peer.

Reads by the consumer's half and writes by the producer's go through the same transports. A batch's completion goes to
whoever posted it; one that nobody posted, or that comes again, goes to the last watcher, which counts it. Every method
is called on the connector's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol, assert_never

from connector.choice import choose
from connector.errors import TransportError
from connector.imports import BatchKey, PeerKey
from connector.plan import PlannedBatch
from connector.transport.base import FENCE_TIMEOUT_S, Completed, Fenced, Op, PeerDown, Transport

logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """What a user of the lanes hears."""

    def completed(self, batch: BatchKey, error: str | None) -> None:
        """Every operation of a batch is terminal."""

    def peer_down(self, peer: PeerKey, cause: str, gone: bool) -> None:
        """The peer is lost, or late with a batch, and is fenced next. `gone`: its process has ended, as far as the
        transport can tell."""

    def fenced(self, peer: PeerKey, cause: str) -> None:
        """No operation that this worker has posted to that peer touches memory any more."""


class _Fence:
    """A peer that is being fenced."""

    def __init__(self, cause: str, overdue: asyncio.TimerHandle) -> None:
        self.cause = cause
        self.overdue = overdue
        self.over = asyncio.Event()


class Lanes:
    """See the module. A peer that has not served a batch within `timeout_s` is down. `on_fault` is told of a transport
    that breaks, or of a mistake of this worker."""

    def __init__(
        self, transports: Mapping[str, Transport], timeout_s: float, on_fault: Callable[[BaseException], None]
    ) -> None:
        self.transports = transports
        self._timeout_s = timeout_s
        self._on_fault = on_fault
        self._watchers: list[Watcher] = []
        self._posters: dict[BatchKey, Watcher] = {}
        self._peers: set[PeerKey] = set()
        self._fencing: dict[PeerKey, _Fence] = {}
        self._broken: set[str] = set()

    def start(self, *watchers: Watcher) -> None:
        """Listen to the transports; `watchers` are told of lost peers, in this order."""
        self._watchers = list(watchers)
        loop = asyncio.get_running_loop()
        for name, transport in self.transports.items():
            loop.add_reader(transport.fileno(), self._poll, name)

    def close(self) -> None:
        """Stop listening and close the transports, which fences every peer.

        Raises:
            TransportError: one cannot be closed; the others are, and nothing proves that its writes have stopped.
        """
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as every:
            for fence in self._fencing.values():
                fence.overdue.cancel()
                fence.over.set()
            for transport in self.transports.values():
                loop.remove_reader(transport.fileno())
                every.callback(transport.close)
        self._peers.clear()
        self._fencing.clear()

    def connect(self, offered: Mapping[str, bytes], peer: str) -> PeerKey:
        """Connect to a peer by the first transport that reaches it. `offered` are its descriptions.

        Raises:
            UnreachableError: none does; the message says why for each.
        """
        key = choose(self.transports, offered, peer)
        self._peers.add(key)
        return key

    def post(self, peer: PeerKey, op: Op, batch: PlannedBatch, poster: Watcher) -> BatchKey:
        """Start a batch; `poster` hears of its end, never before this has returned.

        Raises:
            OutOfBoundsError: a run leaves its region.
            PeerLostError: the peer is down or fenced.
        """
        name, number = peer
        transport = self.transports[name]
        posted = transport.post(number, op, batch.local_region, batch.remote_region, batch.runs, self._timeout_s)
        self._posters[name, posted] = poster
        return name, posted

    def look(self, peer: PeerKey) -> None:
        """What was posted to this peer just now may have ended already: tell at once, without a turn of the loop."""
        self._poll(peer[0])

    def fence(self, peer: PeerKey, cause: str) -> None:
        """Begin to tear the connection to a peer down by force; everyone is told, once, when that has been done. If it
        takes too long, that is a fault."""
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        overdue = asyncio.get_running_loop().call_later(FENCE_TIMEOUT_S, self._not_fenced, peer)
        self._fencing[peer] = _Fence(cause, overdue)
        name, number = peer
        self.transports[name].fence(number)

    def may_touch(self, peer: PeerKey) -> bool:
        """Whether operations posted to that peer may touch memory: it is connected, or its fence has not ended."""
        return peer in self._peers or peer in self._fencing

    async def fenced(self, peer: PeerKey) -> None:
        """Wait until the fence of this peer, if one has begun, has ended; or has taken too long, which is a fault."""
        if fence := self._fencing.get(peer):
            await fence.over.wait()

    def _not_fenced(self, peer: PeerKey) -> None:
        name, number = peer
        fence = self._fencing[peer]
        fence.over.set()
        self._on_fault(
            TransportError(
                f"{name} has not let go of peer {number} within {FENCE_TIMEOUT_S:g} s of tearing its connection down "
                f"by force ({fence.cause}); nothing can be said of the memory, so this process must end"
            )
        )

    def _poll(self, name: str) -> None:
        if name in self._broken:
            return
        try:
            self._take_events(name)
        except Exception as error:
            self._broken.add(name)
            asyncio.get_running_loop().remove_reader(self.transports[name].fileno())
            self._on_fault(error)

    def _take_events(self, name: str) -> None:
        for event in self.transports[name].poll():
            match event:
                case Completed(batch=batch, error=error):
                    poster = self._posters.pop((name, batch), self._watchers[-1])
                    poster.completed((name, batch), error)
                case PeerDown(peer=peer, cause=cause, gone=gone):
                    logger.warning("%s reports that peer %d is down: %s", name, peer, cause)
                    for watcher in self._watchers:
                        watcher.peer_down((name, peer), cause, gone)
                    self.fence((name, peer), cause)
                case Fenced(peer=peer):
                    fence = self._fencing.pop((name, peer))
                    fence.overdue.cancel()
                    for watcher in self._watchers:
                        watcher.fenced((name, peer), fence.cause)
                    fence.over.set()
                case _:
                    assert_never(event)
