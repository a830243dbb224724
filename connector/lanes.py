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
from connector.imports import BatchKey, PeerKey
from connector.plan import PlannedBatch
from connector.transport.base import Completed, Op, PeerDown, Transport

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
            for transport in self.transports.values():
                loop.remove_reader(transport.fileno())
                every.callback(transport.close)

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

    def fence(self, peer: PeerKey, cause: str) -> None:
        """Tear the connection to a peer down by force; everyone is told, once, when that has been done."""
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        name, number = peer
        self.transports[name].fence(number)
        self._poll(name)
        for watcher in self._watchers:
            watcher.fenced(peer, cause)

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
                case _:
                    assert_never(event)
