"""The prefill pool as a decode worker sees it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from connector import EngineId, HandshakeError, PeerLostError
from decode.peers import MEASURE_BLOCKS, PeerLink, Peers
from engine.blocks import BlockTable
from rpc.address import WorkerAddress
from tests.block_pool import full_pool

DEADLINE_S = 20.0


class FakeLink:
    def __init__(self, peer: EngineId) -> None:
        self.peer, self.name, self.transport, self.gb_per_s, self.connected = peer, peer.name, "shm", 0.0, True


class FakeConnector:
    """Links to everyone but those who are `down`; measures 2 GB/s."""

    def __init__(self) -> None:
        self.links: dict[str, FakeLink] = {}
        self.down: set[str] = set()
        self.measured: list[int] = []
        self.measuring: Any = None

    async def connect(self, peer: EngineId, endpoint: object) -> FakeLink:
        if peer.name in self.down:
            raise HandshakeError(f"{peer.name} is down")
        return self.links.setdefault(peer.name, FakeLink(peer))

    async def measure(self, link: FakeLink, block_ids: list[int]) -> float:
        self.measured.append(len(block_ids))
        if self.measuring is not None:
            await self.measuring()
        link.gb_per_s = 2.0
        return 2.0

    async def disconnect(self, peer_name: str) -> None:
        del self.links[peer_name]


class FakeEngine:
    def __init__(self, num_blocks: int = 8) -> None:
        self.blocks = full_pool(num_blocks, 4)
        self.geometry = SimpleNamespace(block_size=4)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(blocks_free=self.blocks.num_free)

    def reserve(self, owner: str, num_tokens: int) -> BlockTable | None:
        return self.blocks.allocate(owner, num_tokens)

    def free(self, table: BlockTable) -> None:
        self.blocks.free(table)


def made(engine: FakeEngine | None = None) -> tuple[Peers, FakeConnector, FakeEngine]:
    connector, engine = FakeConnector(), engine or FakeEngine()
    return Peers(connector, engine, "secret"), connector, engine  # type: ignore[arg-type]


def worker(name: str, incarnation: int = 1) -> WorkerAddress:
    return WorkerAddress(
        name=name,
        role="prefill",
        incarnation=incarnation,
        rpc="127.0.0.1:1",
        connector_host="127.0.0.1",
        connector_port=1,
        pid=1,
        host="127.0.0.1",
    )


async def test_every_worker_is_linked_to_and_measured_once() -> None:
    peers, connector, engine = made()
    both = [worker("a"), worker("b")]
    assert await peers.set(both) == [PeerLink("a", "shm", 2.0), PeerLink("b", "shm", 2.0)]
    await peers.set(both)
    assert connector.measured == [4, 4], "half of the free blocks each"
    assert engine.blocks.num_free == 8
    await peers.close()
    assert connector.links == {}


async def test_a_measurement_takes_no_more_blocks_than_it_needs() -> None:
    peers, connector, _ = made(FakeEngine(1000))
    await peers.set([worker("a")])
    assert connector.measured == [MEASURE_BLOCKS]
    await peers.close()


async def test_the_one_with_the_fewest_requests_is_picked_and_only_if_it_is_reachable() -> None:
    peers, connector, _ = made()
    assert peers.pick() is None
    await peers.set([worker("a"), worker("b")])
    first = peers.pick()
    assert first is not None
    first.in_flight += 1
    second = peers.pick()
    assert second is not None
    assert second.engine_id != first.engine_id
    connector.links[second.engine_id.name].connected = False
    assert peers.pick() is first
    connector.links[first.engine_id.name].connected = False
    assert peers.pick() is None
    await peers.close()


async def test_one_worker_that_is_down_does_not_keep_the_others_out() -> None:
    peers, connector, _ = made()
    connector.down = {"b"}
    with pytest.raises(HandshakeError, match="b is down"):
        await peers.set([worker("a"), worker("b"), worker("c")])
    assert set(connector.links) == {"a", "c"}
    connector.down = set()
    assert [link.name for link in await peers.set([worker("a"), worker("b"), worker("c")])] == ["a", "b", "c"]
    await peers.close()


async def test_a_new_incarnation_replaces_the_old_one() -> None:
    peers, connector, _ = made()
    await peers.set([worker("a", 1)])
    await peers.set([worker("a", 2)])
    picked = peers.pick()
    assert picked is not None
    assert picked.engine_id == EngineId("a", 2)
    assert connector.links["a"].peer == EngineId("a", 2)
    await peers.close()


async def test_a_busy_pool_is_not_measured_with() -> None:
    peers, connector, engine = made()
    assert engine.blocks.allocate("requests", 8 * 4) is not None
    assert await peers.set([worker("a")]) == [PeerLink("a", "shm", 0.0)]
    assert connector.measured == []
    await peers.close()


async def test_a_link_that_cannot_be_measured_is_a_link_all_the_same() -> None:
    peers, connector, engine = made()

    async def lost() -> None:
        raise PeerLostError("gone for a moment")

    connector.measuring = lost
    assert await peers.set([worker("a")]) == [PeerLink("a", "shm", 0.0)]
    assert engine.blocks.num_free == 8
    await peers.close()


async def test_a_measurement_that_is_cancelled_gives_its_blocks_back() -> None:
    peers, connector, engine = made()
    begun = asyncio.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    connector.measuring = hang
    task = asyncio.create_task(peers.set([worker("a")]))
    async with asyncio.timeout(DEADLINE_S):
        await begun.wait()
        assert engine.blocks.num_free == 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await peers.close()  # nobody holds the lock any more
    assert task.cancelled()
    assert engine.blocks.num_free == 8
    assert connector.links == {}
