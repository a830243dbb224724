"""WRITEs between two real processes, over real transports: what only a second process can show."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Literal

import msgspec
import pytest

from connector import ConnectorConfig, DestinationRef, Reason, new_engine_id
from tests.connector.test_processes import BLOCKS, TOKENS, Consumer, consuming, everything_released
from tests.connector.worker_process import NUM_BLOCKS, PATIENCE_S, worker_process
from tests.connector.writing import Pushing, Receiving

pytestmark = pytest.mark.process
Name = Literal["shm", "ucx"]
both = pytest.mark.parametrize("transport", ["shm", "ucx"])


async def started(consumer: Consumer, seed: int) -> Receiving:
    """A WRITE of which nothing has been computed."""
    receiving = Receiving(consumer.worker, consumer.link, TOKENS)
    destination = msgspec.to_builtins(receiving.destination)
    await consumer.producer.ask("write", destination=destination, seed=seed)
    return receiving


async def compute(consumer: Consumer, receiving: Receiving, num_tokens: int = TOKENS) -> None:
    """The producer's forward pass goes on."""
    await consumer.producer.ask("compute", transfer_id=receiving.receive.transfer_id, num_tokens=num_tokens)


async def over(*receivings: Receiving) -> list[str]:
    """How they ended."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(receiving.settled.wait() for receiving in receivings))
    return [receiving.outcomes[0].reason or receiving.outcomes[0].outcome for receiving in receivings]


@both
async def test_pages_are_written_by_another_process_exactly_as_they_were(transport: Name) -> None:
    async with consuming(ConnectorConfig(transport=transport, mode="write")) as consumer:
        receivings = [await started(consumer, seed) for seed in range(6)]
        for num_tokens in (40, 41, 100, TOKENS):
            for receiving in receivings:
                await compute(consumer, receiving, num_tokens)
        for seed, receiving in enumerate(receivings):
            imported = await receiving.receive.landed()
            assert (imported.transport, imported.bytes) == (transport, BLOCKS * consumer.worker.pool.block_bytes)
            assert consumer.worker.pool.holds(receiving.blocks, seed)
            consumer.worker.pool.give_back(receiving.blocks)
        await everything_released(consumer.producer)
        assert await consumer.producer.end() == 0


@both
async def test_a_producer_killed_under_its_writes_settles_every_destination(transport: Name) -> None:
    async with consuming(ConnectorConfig(transport=transport, mode="write")) as consumer:
        receivings = [await started(consumer, seed) for seed in range(8)]
        for receiving in receivings[:6]:
            await compute(consumer, receiving, 100)
        await consumer.producer.kill()
        assert set(await over(*receivings)) == {Reason.PEER_LOST}
        assert len(consumer.worker.pool.free) == NUM_BLOCKS
        consumer.worker.pool.bytes[:] = 0xA5
        assert consumer.worker.connector.stats().blocks_quarantined == 0


@both
async def test_what_a_stopped_producer_may_still_write_stays_quarantined(transport: Name) -> None:
    """It is not dead: it may be in the middle of a copy, and go on whenever it is continued."""
    config = ConnectorConfig(transport=transport, mode="write", import_timeout_s=1.0)
    async with consuming(config) as consumer:
        stats = consumer.worker.connector.stats
        receivings = [await started(consumer, seed) for seed in range(2)]
        await compute(consumer, receivings[0], 100)
        os.kill(consumer.producer.pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, consumer.producer.pid, os.WSTOPPED | os.WNOWAIT)
        waiting = receivings[0].wait()
        receivings[1].receive.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while stats().blocks_quarantined < 2 * BLOCKS:
                await asyncio.sleep(0.01)
        assert [receiving.outcomes for receiving in receivings] == [[], []]
        os.kill(consumer.producer.pid, signal.SIGCONT)
        assert await over(*receivings) == [Reason.TIMEOUT, Reason.CANCELLED]
        await asyncio.wait({waiting})
        assert waiting.exception() is not None
        assert len(consumer.worker.pool.free) == NUM_BLOCKS
        again = await started(consumer, 9)
        await compute(consumer, again)
        await again.receive.landed()
        assert consumer.worker.pool.holds(again.blocks, 9)


@both
async def test_a_consumer_killed_under_writes_gives_the_producer_its_blocks_back(transport: Name) -> None:
    config = ConnectorConfig(transport=transport, mode="write")
    async with consuming(config) as ours, worker_process(new_engine_id("decode-1"), config) as consumer:
        # This process is the producer now.
        producer = ours.worker
        where = {"host": producer.endpoint.host, "port": producer.endpoint.port}
        name, incarnation = producer.engine_id.name, producer.engine_id.incarnation
        await consumer.ask("connect", name=name, incarnation=incarnation, **where)
        pushings = []
        for seed in range(4):
            destination = msgspec.convert(await consumer.ask("receive", name=name, num_tokens=TOKENS), DestinationRef)
            pushings.append(Pushing(producer, destination, seed))
            pushings[-1].compute(100)
        await consumer.kill()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(pushing.ended.wait() for pushing in pushings))
        assert {end.outcome for pushing in pushings for end in pushing.ends} == {"failed"}
        assert len(producer.pool.free) == NUM_BLOCKS
