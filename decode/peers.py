"""The prefill workers that a decode worker knows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc
import msgspec

from connector import Connector, ConnectorError, Endpoint, EngineId, Link
from engine import Engine
from rpc.address import WorkerAddress
from rpc.channel import open_channel
from rpc.v1 import prefill_pb2_grpc

logger = logging.getLogger(__name__)

MEASURE_BLOCKS = 64


class PeerLink(msgspec.Struct, frozen=True):
    """How pages come from one prefill worker. `gb_per_s` is measured, in 10^9 bytes a second."""

    name: str
    transport: str
    gb_per_s: float


class PrefillPeer:
    """One prefill worker: where its calls go, and how its pages come."""

    def __init__(self, address: WorkerAddress, link: Link, channel: grpc.aio.Channel) -> None:
        self.engine_id = EngineId(address.name, address.incarnation)
        self.link = link
        self.stub = prefill_pb2_grpc.PrefillStub(channel)
        self.in_flight = 0
        self._channel = channel

    async def close(self) -> None:
        """Cancel its calls and close the channel."""
        await self._channel.close(None)


class Peers:
    """The prefill pool as this worker sees it."""

    def __init__(self, connector: Connector, engine: Engine, token: str) -> None:
        self._connector = connector
        self._engine = engine
        self._token = token
        self._peers: dict[EngineId, PrefillPeer] = {}
        self._changing = asyncio.Lock()

    async def set(self, workers: Sequence[WorkerAddress]) -> list[PeerLink]:
        """Link to each of `workers`, measure the new ones, drop the others.

        Raises:
            ConnectorError: of the first worker that cannot be linked to; all others are linked, and serve.
        """
        async with self._changing:
            wanted = {EngineId(worker.name, worker.incarnation): worker for worker in workers}
            for engine_id in [known for known in self._peers if known not in wanted]:
                await self._drop(engine_id)
            refused: list[ConnectorError] = []
            for engine_id, worker in wanted.items():
                if engine_id in self._peers:
                    continue
                try:
                    await self._add(engine_id, worker)
                except ConnectorError as error:
                    logger.warning("%s cannot be linked to: %s", engine_id, error)
                    refused.append(error)
            if refused:
                raise refused[0]
            return [
                PeerLink(engine_id.name, self._peers[engine_id].link.transport, self._peers[engine_id].link.gb_per_s)
                for engine_id in wanted
            ]

    def pick(self) -> PrefillPeer | None:
        """The one with the fewest requests in flight, of those that are reachable now."""
        reachable = [peer for peer in self._peers.values() if peer.link.connected]
        return min(reachable, key=lambda peer: peer.in_flight, default=None)

    async def close(self) -> None:
        """Drop every peer."""
        async with self._changing:
            for engine_id in list(self._peers):
                await self._drop(engine_id)

    async def _add(self, engine_id: EngineId, worker: WorkerAddress) -> None:
        link = await self._connector.connect(engine_id, Endpoint(worker.connector_host, worker.connector_port))
        self._peers[engine_id] = PrefillPeer(worker, link, open_channel(worker.rpc, self._token))
        await self._measure(link)

    async def _measure(self, link: Link) -> None:
        """A busy pool is not kept waiting for this; the bandwidth then stays unknown."""
        block_size = self._engine.geometry.block_size
        num_blocks = min(MEASURE_BLOCKS, self._engine.stats().blocks_free // 2)
        table = self._engine.reserve(f"measuring {link.name}", num_blocks * block_size) if num_blocks else None
        if table is None:
            logger.warning("no free blocks to measure the link to %s with", link.peer)
            return
        try:
            await self._connector.measure(link, table.block_ids)
        except ConnectorError as error:
            logger.warning("the link to %s could not be measured: %s", link.peer, error)
        finally:
            self._engine.free(table)

    async def _drop(self, engine_id: EngineId) -> None:
        peer = self._peers.pop(engine_id)
        await peer.close()
        await self._connector.disconnect(engine_id.name)
