"""Two real processes, over real transports: what only a second process can show."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from connector import (
    ConnectorConfig,
    Imported,
    Link,
    Pull,
    Reason,
    RegistrationError,
    SourceRef,
    new_engine_id,
    new_transfer_id,
)
from tests.connector.pair import Held, Reading, Worker
from tests.connector.pool import Pool
from tests.connector.worker_process import NUM_BLOCKS, PATIENCE_S, WorkerProcess, settled, wide_worker, worker_process

pytestmark = pytest.mark.process
Name = Literal["shm", "ucx", "tcp"]
every = pytest.mark.parametrize("transport", ["shm", "ucx", "tcp"])
BLOCKS, TOKENS = 32, 126


class Consumer:
    """This process's worker, linked to a producer in another one."""

    def __init__(self, worker: Worker, producer: WorkerProcess, link: Link) -> None:
        self.worker = worker
        self.producer = producer
        self.link = link

    async def reading(self, seed: int) -> Reading:
        """A read that has been started."""
        pull: Pull = self.worker.connector.begin(self.link, new_transfer_id())
        source = await self.producer.source(pull.transfer_id, self.worker.engine_id, TOKENS, seed)
        return Reading(self.worker, pull, source)


@asynccontextmanager
async def consuming(config: ConnectorConfig) -> AsyncIterator[Consumer]:
    async with worker_process(new_engine_id("prefill-0"), config) as producer:
        worker = wide_worker(new_engine_id("decode-0"), config)
        await worker.start()
        try:
            link = await worker.connector.connect(producer.engine_id, producer.endpoint)
            yield Consumer(worker, producer, link)
        finally:
            await worker.connector.close()
        assert worker.connector.failure is None


@every
async def test_pages_come_from_another_process_exactly_as_they_were(transport: Name) -> None:
    async with consuming(ConnectorConfig(transport=transport)) as consumer:
        assert consumer.link.transport == transport
        for seed in range(5):
            reading = await consumer.reading(seed)
            imported: Imported = await reading.task
            assert (imported.num_tokens, imported.transport) == (TOKENS, transport)
            assert imported.bytes == BLOCKS * consumer.worker.pool.block_bytes
            assert consumer.worker.pool.holds(reading.blocks, seed)
            consumer.worker.pool.give_back(reading.blocks)
        await everything_released(consumer.producer)
        assert await consumer.producer.end() == 0


async def everything_released(producer: WorkerProcess) -> None:
    """Every ACK has arrived: nothing is held and every block is free, long before a lease ends."""
    async with asyncio.timeout(PATIENCE_S):
        while (stats := await producer.ask("stats"))["held"]:
            pass
    assert stats["free"] == NUM_BLOCKS
    assert stats["counters"].get("sources_expired", 0) == 0


@every
async def test_many_reads_at_once_leave_nothing_behind(transport: Name) -> None:
    async with consuming(ConnectorConfig(transport=transport)) as consumer:
        descriptors = None
        for round_ in range(3):
            readings = [await consumer.reading(seed) for seed in range(8)]
            readings[3].task.cancel()
            cancelled = readings.pop(3)
            assert await settled(readings) == ["published"] * 7
            async with asyncio.timeout(PATIENCE_S):
                await cancelled.settled.wait()
            for seed, reading in zip([0, 1, 2, 4, 5, 6, 7], readings, strict=True):
                assert consumer.worker.pool.holds(reading.blocks, seed), f"round {round_}, seed {seed}"
                consumer.worker.pool.give_back(reading.blocks)
            if cancelled.outcomes[0].outcome == "published":
                consumer.worker.pool.give_back(cancelled.blocks)
            await everything_released(consumer.producer)
            gc.collect()  # what earlier tests have left in cycles goes now, not between two counts
            now_open = len(os.listdir("/proc/self/fd"))
            assert descriptors in (None, now_open)
            descriptors = now_open
        assert len(consumer.worker.pool.free) == NUM_BLOCKS
        assert consumer.worker.pool.custody.violations == []


@every
async def test_bandwidth_is_measured(transport: Name) -> None:
    async with consuming(ConnectorConfig(transport=transport)) as consumer:
        blocks = consumer.worker.pool.take(64)
        speed = await consumer.worker.connector.measure(consumer.link, blocks)
        assert 0 < speed < 1000
        assert consumer.worker.connector.stats().links[0].gb_per_s == speed


async def sources(consumer: Consumer, count: int) -> list[tuple[Pull, SourceRef]]:
    """Transfers whose prompts have been computed, not read yet."""
    pulls = [consumer.worker.connector.begin(consumer.link, new_transfer_id()) for _ in range(count)]
    return [
        (pull, await consumer.producer.source(pull.transfer_id, consumer.worker.engine_id, TOKENS, seed))
        for seed, pull in enumerate(pulls)
    ]


async def test_a_producer_killed_during_reads_fails_them_and_settles_every_destination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with consuming(ConnectorConfig(transport="ucx")) as consumer:
        held = await sources(consumer, 8)
        os.kill(consumer.producer.pid, signal.SIGSTOP)  # over TCP nothing moves now
        readings = [Reading(consumer.worker, pull, source) for pull, source in held]
        await asyncio.sleep(0)
        assert consumer.worker.connector.stats().imports_active == 8
        await consumer.producer.kill()
        assert set(await settled(readings)) <= {Reason.PEER_LOST, Reason.TRANSFER_ERROR}
        assert len(consumer.worker.pool.free) == NUM_BLOCKS


async def test_a_producer_killed_under_shared_memory_copies_settles_every_destination() -> None:
    """Copies from a dead process's memory do not fail by themselves."""
    async with consuming(ConnectorConfig(transport="shm")) as consumer:
        held = await sources(consumer, 10)
        readings = [Reading(consumer.worker, pull, source) for pull, source in held[:8]]
        await asyncio.sleep(0)
        await consumer.producer.kill()
        readings += [Reading(consumer.worker, pull, source) for pull, source in held[8:]]
        outcomes = await settled(readings)
        assert set(outcomes[:8]) <= {"published", Reason.PEER_LOST, Reason.TRANSFER_ERROR}
        assert outcomes[8:] == [Reason.PEER_LOST] * 2
        for seed, reading in enumerate(readings):
            if reading.outcomes[0].outcome == "published":
                assert consumer.worker.pool.holds(reading.blocks, seed)
                consumer.worker.pool.give_back(reading.blocks)
        assert len(consumer.worker.pool.free) == NUM_BLOCKS


async def test_a_release_towards_a_killed_producer_raises_nothing() -> None:
    async with consuming(ConnectorConfig(handshake_timeout_s=2.0)) as consumer:
        held = await sources(consumer, 2)
        await consumer.producer.kill()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(pull.release("client gone") for pull, _ in held))


async def test_a_producer_that_hangs_during_a_read_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, one-sided operations need the target's help; a stopped process gives none and reports nothing."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with consuming(ConnectorConfig(transport="ucx", import_timeout_s=2.0)) as consumer:
        ((pull, source),) = await sources(consumer, 1)
        os.kill(consumer.producer.pid, signal.SIGSTOP)
        reading = Reading(consumer.worker, pull, source)
        assert await settled([reading]) == [Reason.TIMEOUT]
        os.kill(consumer.producer.pid, signal.SIGCONT)
        connector = consumer.worker.connector
        await connector.disconnect(consumer.producer.engine_id.name)
        consumer.link = await connector.connect(consumer.producer.engine_id, consumer.producer.endpoint)
        again = await consumer.reading(seed=2)
        assert await settled([again]) == ["published"]
        assert consumer.worker.pool.holds(again.blocks, 2)


@every
async def test_sources_of_a_killed_consumer_are_free_within_the_lease(transport: Name) -> None:
    config = ConnectorConfig(transport=transport, lease_s=2.0, renew_s=0.2)
    producer = wide_worker(new_engine_id("prefill-0"), config)
    await producer.start()
    try:
        async with worker_process(new_engine_id("decode-0"), config) as consumer:
            await consumer.ask(
                "connect",
                name=producer.engine_id.name,
                incarnation=producer.engine_id.incarnation,
                host=producer.endpoint.host,
                port=producer.endpoint.port,
            )
            ids = [new_transfer_id() for _ in range(3)]
            for transfer_id in ids:
                await consumer.ask("begin", name=producer.engine_id.name, transfer_id=transfer_id)
            held = [Held(producer, consumer.engine_id, transfer_id) for transfer_id in ids]
            for source in held[:2]:
                source.hold(TOKENS, seed=1)
            await consumer.kill()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(source.ended.wait() for source in held))
            assert [source.ends[0].outcome for source in held] == ["expired", "expired", "failed"]
            assert len(producer.pool.free) == NUM_BLOCKS
            assert await producer.connector.sources.drained(PATIENCE_S)
    finally:
        await producer.connector.close()


async def test_shared_memory_is_chosen_on_one_host() -> None:
    async with consuming(ConnectorConfig()) as consumer:
        assert consumer.link.transport == "shm"


async def test_a_required_transport_that_cannot_be_used_says_why() -> None:
    pool = Pool()
    pool.memory = type(pool.memory)(address=pool.memory.address, length=pool.memory.length, fd=None)
    worker = Worker(new_engine_id("decode-0"), None, ConnectorConfig(transport="shm"), pool=pool)
    with pytest.raises(RegistrationError, match=r"no transport can be used by this worker \(shm: .*memfd"):
        await worker.start()


async def test_a_pool_without_a_descriptor_goes_by_ucx() -> None:
    pool = Pool()
    pool.memory = type(pool.memory)(address=pool.memory.address, length=pool.memory.length, fd=None)
    worker = Worker(new_engine_id("decode-0"), None, pool=pool)
    peer = Worker(new_engine_id("prefill-0"), None)
    await worker.start()
    await peer.start()
    link = await worker.connector.connect(peer.engine_id, peer.endpoint)
    assert link.transport == "ucx"
    await worker.connector.close()
    await peer.connector.close()
