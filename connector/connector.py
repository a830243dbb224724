"""The connector of one worker: everything between its page pool and the others'.

It owns the listener, the transports, the links and both state machines' shells, and runs on one event loop; all methods
are called there. Nothing in it waits without a deadline. A fault of its own (a bug, or a transport that breaks) closes
it as a whole, loudly: `failure` is set, every import settles and every source ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from connector.acceptor import Acceptor
from connector.choice import builders, open_transports
from connector.compatibility import CompatibilityRecord
from connector.config import ConnectorConfig
from connector.consumers import Consumers
from connector.destination import DestinationRef
from connector.dial import dial
from connector.errors import ConnectorError, PeerLostError
from connector.geometry import check_geometry
from connector.handshake import Identity
from connector.identity import EngineId
from connector.importer import Importer, ImportOutcome
from connector.imports import PeerKey
from connector.lanes import Lanes
from connector.link import Link
from connector.listener import Listeners
from connector.measure import measure
from connector.pages import PoolGeometry
from connector.ports import Endpoint, ListenOn
from connector.pull import Pull
from connector.pusher import Pusher
from connector.receive import Receive
from connector.sink import Sink
from connector.sources import Sources
from connector.tls import load_tls
from connector.transport.base import Memory, Transport
from connector.wire import Record

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often leases and deadlines are looked at. A source that is reaped late, or an import, does no harm."""


class LinkStats(msgspec.Struct, frozen=True, kw_only=True):
    """One link. `gb_per_s` is 10^9 bytes a second as last measured, 0 when it was not."""

    name: str
    transport: str
    gb_per_s: float
    connected: bool


class ConnectorStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a connector holds and has done; `counters` only grow."""

    counters: dict[str, int]
    sources_held: int
    imports_active: int
    blocks_quarantined: int
    links: list[LinkStats]


class Connector:
    """See the module.

    `memory` is the page pool, `geometry` how pages lie in it. `token` is the cluster's shared secret. `transports`
    replaces what `config.transport` would build.

    Raises:
        ConnectorError: an empty token, or TLS files that cannot be used.
        PlanError: a geometry that does not fit `memory`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        engine_id: EngineId,
        memory: Memory,
        geometry: PoolGeometry,
        compatibility: CompatibilityRecord,
        token: bytes,
        clock: Callable[[], float] = time.monotonic,
        *,
        transports: Mapping[str, Callable[[], Transport]] | None = None,
    ) -> None:
        if not token:
            raise ConnectorError("the cluster token is empty; give every worker of the cluster the same secret")
        check_geometry(geometry, str(engine_id))
        if geometry.region_bytes != (memory.length,):
            raise ConnectorError(
                f"{engine_id}: the pool's memory has {memory.length} bytes, its geometry {geometry.region_bytes}"
            )
        self.engine_id = engine_id
        self.sources = Sources(engine_id, geometry, config.lease_s, clock)
        self.failure: BaseException | None = None
        self._config = config
        self._memory = memory
        self._geometry = geometry
        self._compatibility = compatibility
        self._token = token
        self._clock = clock
        self._tls = load_tls(config)
        self._wanted = transports or builders(str(engine_id), config)
        self._sink = Sink({group.name: group.num_blocks for group in geometry.groups})
        self._counters: Counter[str] = Counter()
        self._links: dict[str, Link] = {}
        self._dialling: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._listeners = Listeners()
        self._running: _Running | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> Endpoint:
        """Take a port, open the transports, and answer consumers. Returns where peers reach this worker.

        Raises:
            ListenerError: the port, or every port of the range, is busy, or the host cannot be listened on.
            RegistrationError: the required transport, or every one, cannot be used here.
            ConnectorError: it was started or closed before.
        """
        if self._running is not None or self._closing is not None:
            raise ConnectorError(f"the connector of {self.engine_id} was started before; make a new one")
        config = self._config
        (listener,) = self._listeners.allocate(ListenOn(config.host, config.candidate_ports()))
        try:
            transports = open_transports(self._wanted, self._memory)
        except BaseException:
            self._listeners.close()
            raise
        us = self._identity(transports)
        lanes = Lanes(transports, config.import_timeout_s, self._fault)
        importer = Importer(
            lanes, self._sink, self._clock, timeout_s=config.import_timeout_s, on_peer_lost=self._data_lost
        )
        consumers = Consumers(lanes)
        pusher = self.sources.attach(lanes, consumers)
        acceptor = Acceptor(
            us,
            self.sources,
            consumers,
            answer_s=config.handshake_timeout_s,
            idle_s=config.lease_s,
            on_fault=self._fault,
        )
        ticking = asyncio.get_running_loop().create_task(self._tick(importer), name=f"leases of {self.engine_id}")
        ticking.add_done_callback(self._ended)
        self._running = _Running(us, lanes, importer, pusher, acceptor, ticking)
        lanes.start(pusher, importer)
        try:
            await acceptor.start(listener, self._tls.server)
        except BaseException:
            await self.close()
            raise
        logger.info("%s listens on %s, transports: %s", self.engine_id, listener.endpoint, ", ".join(transports))
        return listener.endpoint

    async def close(self) -> None:
        """Release and settle everything, end every source, and give everything back. Closing twice is harmless."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name=f"closing {self.engine_id}")
            self._closing.add_done_callback(self._ended)
        await asyncio.shield(self._closing)

    async def connect(self, peer: EngineId, endpoint: Endpoint) -> Link:
        """The link to `peer`, made by a handshake if there is none. Another incarnation of it is replaced.

        A link that exists is returned as it is: when it is down, it is being re-made.

        Raises:
            IncompatibleError: the two workers' records differ; the message names the fields with both values.
            WrongIncarnationError: another incarnation listens there.
            HandshakeError: nothing listens there, or either end refused the other.
            UnreachableError: no transport reaches the peer.
            ConnectorError: this connector is not running.
        """
        running = self._require_running()
        lock = self._dialling.setdefault(peer.name, asyncio.Lock())
        async with lock:
            known = self._links.get(peer.name)
            if known is not None and known.peer == peer:
                return known
            session = await dial(
                running.us, peer, endpoint, running.lanes, None, self._config.handshake_timeout_s, self._tls.client
            )
            link = Link(
                running.us,
                peer,
                endpoint,
                session,
                running.lanes,
                self._tls.client,
                running.importer,
                self._clock,
                renew_s=self._config.renew_s,
                heartbeat_s=self._config.heartbeat_s,
                answer_s=self._config.handshake_timeout_s,
                counters=self._counters,
                on_gone=self._gone,
                on_fault=self._fault,
            )
            link.start()
            if self._closing is not None:
                await link.close()
                self._require_running()
            self._links[peer.name] = link
            logger.info("linked to %s at %s, pages by %s", peer, endpoint, link.transport)
            if known is not None:
                known.process_ended(f"{peer} has taken its place")
                await known.close()
            return link

    async def disconnect(self, peer_name: str, *, process_ended: bool = False) -> None:
        """Drop a peer: its imports settle, its sources are released. Unknown names are fine.

        Blocks that it was asked to write into are its until it has said that it stops, or has ended. Who knows that its
        process has ended says so by `process_ended`.
        """
        link = self._links.pop(peer_name, None)
        if link is not None:
            if process_ended:
                link.process_ended("its process has ended")
            await link.close()

    def link(self, peer_name: str) -> Link | None:
        """The link to the worker called `peer_name`, up or being re-made."""
        return self._links.get(peer_name)

    async def measure(self, link: Link, block_ids: list[int]) -> float:
        """Bandwidth of a READ into blocks that the caller owns, in 10^9 bytes a second; also kept in `link.gb_per_s`.

        When this returns or raises, nothing writes into the blocks any more.

        Raises:
            PlanError: the ids are not blocks of this pool's first group.
            PeerLostError: the peer cannot be read from, or was lost.
        """
        importer = self._require_running().importer
        link.gb_per_s = await measure(link, importer, self._geometry, block_ids, self._clock)
        logger.info("pages from %s come by %s at %.2f GB/s", link.peer, link.transport, link.gb_per_s)
        return link.gb_per_s

    def begin(self, link: Link, transfer_id: str) -> Pull:
        """Admission of a transfer, before the producer is asked: its lease is renewed from now on, until the ACK.

        Raises:
            PeerLostError: the peer is gone, or was disconnected.
            ValueError: the id was used before.
        """
        importer = self._require_running().importer
        if link.gone:
            raise PeerLostError(f"{link.peer} is gone; pick another worker")
        return Pull(transfer_id, link, importer, self._geometry, self._clock, answer_s=self._config.handshake_timeout_s)

    def receive(
        self,
        link: Link,
        transfer_id: str,
        blocks: Mapping[str, Sequence[int]],
        num_tokens: int,
        on_settled: Callable[[ImportOutcome], None],
        *,
        local_tokens: int = 0,
    ) -> Receive:
        """Admission of a WRITE, before the producer is asked: the blocks are the import's until `on_settled`.

        `blocks` are for the tokens from `local_tokens` (whole blocks that this worker has already) to `num_tokens`.

        Raises:
            PeerLostError: the peer is gone, was disconnected, or cannot be reached at the moment.
            PlanError: these are not blocks of this pool for that many tokens.
            InvalidTransition: a block belongs to another import.
            ValueError: the id was used before.
        """
        importer = self._require_running().importer
        if link.gone:
            raise PeerLostError(f"{link.peer} is gone; pick another worker")
        destination = DestinationRef(
            transfer_id=transfer_id,
            consumer=self.engine_id,
            blocks={name: list(ids) for name, ids in blocks.items()},
            num_tokens=num_tokens,
            local_tokens=local_tokens,
        )
        return Receive(destination, link, importer, self._geometry, self._clock, on_settled)

    def stats(self) -> ConnectorStats:
        """A snapshot."""
        counters = self._counters + self.sources.counters + self._sink.counters
        if self._running is not None:
            counters += self._running.acceptor.counters + self._running.importer.counters
        return ConnectorStats(
            counters=dict(counters),
            sources_held=self.sources.held,
            imports_active=self._sink.active,
            blocks_quarantined=self._sink.quarantined,
            links=[
                LinkStats(name=link.name, transport=link.transport, gb_per_s=link.gb_per_s, connected=link.connected)
                for link in self._links.values()
            ],
        )

    def _identity(self, transports: Mapping[str, Transport]) -> Identity:
        record = Record(
            compatibility=self._compatibility,
            geometry=self._geometry,
            lease_s=self._config.lease_s,
            transports={name: transport.describe() for name, transport in transports.items()},
        )
        return Identity(engine_id=self.engine_id, token=self._token, record=record)

    def _require_running(self) -> _Running:
        if self.failure is not None:
            raise ConnectorError(f"the connector of {self.engine_id} has failed: {self.failure}") from self.failure
        if self._running is None or self._closing is not None:
            raise ConnectorError(f"the connector of {self.engine_id} is not running")
        return self._running

    async def _tick(self, importer: Importer) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self._config.lease_s / 4, self._config.import_timeout_s / 4))
            self.sources.reap()
            importer.tick()

    def _data_lost(self, peer: PeerKey, cause: str) -> None:
        for link in self._links.values():
            if link.data_peer == peer:
                link.data_lost(cause)

    def _gone(self, link: Link) -> None:
        if self._links.get(link.name) is link:
            del self._links[link.name]

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault(error)

    def _fault(self, error: BaseException) -> None:
        logger.critical("the connector of %s has failed and closes", self.engine_id, exc_info=error)
        if self.failure is None:
            self.failure = error
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name=f"closing {self.engine_id}")
            self._closing.add_done_callback(self._ended)

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as every:  # in reverse; one that fails does not keep the others
            every.callback(self._listeners.close)
            if self._running is not None:
                every.callback(_close_lanes, self._running)
                every.callback(self.sources.close)
                every.push_async_callback(self._running.acceptor.close)
                every.push_async_callback(_cancel, self._running.ticking)
                every.push_async_callback(self._close_links)

    async def _close_links(self) -> None:
        links = list(self._links.values())
        self._links.clear()
        async with asyncio.TaskGroup() as every:
            for link in links:
                every.create_task(link.close())


def _close_lanes(running: _Running) -> None:
    try:
        running.lanes.close()
    except BaseException as error:
        running.importer.close(error)
        raise
    running.importer.close()
    running.pusher.close()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


class _Running(msgspec.Struct, frozen=True):
    """What exists between `start` and `close`."""

    us: Identity
    lanes: Lanes
    importer: Importer
    pusher: Pusher
    acceptor: Acceptor
    ticking: asyncio.Task[None]
