"""The connector over real verbs: what the guest of deploy/rdma-lab runs, one line for each check.

A plain script rather than tests of the suite: it needs a Soft-RoCE device of its own, and in the guest a process takes
long to start, so that the checks share their peers. UCX is restricted to verbs by the environment, so that nothing else
can have carried a byte.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager

from connector import ConnectorConfig, Reason, new_engine_id
from connector.transport.base import Runs
from connector.transport.ucx import UcxTransport
from connector.transport.ucx_library import SYSTEM, find_library
from tests.connector.fabric import Bytes
from tests.connector.far_process import SIZES, Far, digest, far_process, pattern
from tests.connector.near import Near, near_end, runs
from tests.connector.pair import Reading, Worker
from tests.connector.rdma_device import RdmaDevice, only_device
from tests.connector.test_processes import BLOCKS, TOKENS, Consumer, everything_released, sources
from tests.connector.test_write_processes import compute, over, started
from tests.connector.worker_process import NUM_BLOCKS, settled, wide_worker, worker_process

CHECK_TIMEOUT_S = 240.0
# Everything in the guest is emulated: the same settings as on a machine, with ten times the patience.
CONFIG = ConnectorConfig(
    transport="ucx",
    ucx_library="system",
    lease_s=300.0,
    renew_s=20.0,
    handshake_timeout_s=100.0,
    import_timeout_s=100.0,
)
SCATTERED = runs((13, 7, 3), (1 << 20, (2 << 20) + 1, 4097), (8192, 4096, 4096), (5 << 20, 6 << 20, 4 << 20))
"""Of every alignment; (near's offset, far's offset, bytes)."""
READS = 15
"""At once; together they take most of the pool's blocks."""
FIRST_PACKETS = 1000
"""Of some thirty thousand that those reads take."""
FREED = 0xEE


async def check(name: str, doing: Coroutine[None, None, str]) -> None:
    """One check and its line; what it raises is the script's end."""
    print(f"...   {name}")
    started = time.monotonic()
    async with asyncio.timeout(CHECK_TIMEOUT_S):
        found = await doing
    print(f"ok    {name}: {found} ({time.monotonic() - started:.0f} s)")


@contextmanager
def carrying(device: RdmaDevice, num_bytes: int) -> Iterator[None]:
    """What happens meanwhile must send as many packets as can have carried `num_bytes`."""
    before = device.packets_sent()
    yield
    packets = device.packets_sent() - before
    assert packets * device.packet_bytes() >= num_bytes, f"{packets} packets cannot have carried {num_bytes} bytes"


async def memory_is_registered(device: RdmaDevice, near: Near) -> str:
    """The kernel knows both regions."""
    assert set(SIZES) <= set(device.registered_bytes(os.getpid()))
    assert isinstance(near.transport, UcxTransport)
    return f"{len(SIZES)} regions, UCX {near.transport.version} from {near.transport.path}"


async def reads_arrive(device: RdmaDevice, near: Near, peer: int) -> str:
    """Gets, and nothing beside them."""
    expected = moved(SCATTERED, pattern(100, SIZES[0]), pattern(1, SIZES[0]))
    with carrying(device, SCATTERED.total_bytes):
        assert near.wait([near.post(peer, "read", SCATTERED)]) == [None]
    assert digest(near.regions.arrays[0]) == digest(expected)
    return f"{SCATTERED.total_bytes} bytes"


async def writes_arrive(device: RdmaDevice, near: Near, far: Far, peer: int) -> str:
    """Puts, the flush that says that they have arrived, and nothing beside them."""
    near.regions.arrays[0][:] = pattern(2, SIZES[0])
    there_to_here = Runs(local=SCATTERED.remote, remote=SCATTERED.local, length=SCATTERED.length)
    expected = moved(there_to_here, pattern(2, SIZES[0]), pattern(100, SIZES[0]))
    with carrying(device, SCATTERED.total_bytes):
        assert near.wait([near.post(peer, "write", SCATTERED)]) == [None]
    assert far.digests() == [digest(expected), digest(pattern(101, SIZES[1]))]
    return f"{SCATTERED.total_bytes} bytes"


def moved(batch: Runs, source: Bytes, destination: Bytes) -> Bytes:
    """What the destination holds after the runs, whose local side it is."""
    after = destination.copy()
    for local, remote, length in zip(batch.local, batch.remote, batch.length, strict=True):
        after[local : local + length] = source[remote : remote + length]
    return after


async def a_fence_ends_what_is_in_flight(device: RdmaDevice, near: Near, peer: int) -> str:
    """The peer lives on; the memory is ours again, and the connection carries nothing any more."""
    assert device.connections(os.getpid()) == ["RTS"]
    posted = [near.post(peer, "read", runs((0, 0, 16 << 20))) for _ in range(4)]
    near.fence(peer)
    near.collect()
    assert set(posted) <= set(near.completed)
    assert device.connections(os.getpid()) == ["ERR"]
    near.regions.arrays[0][:] = FREED
    await asyncio.sleep(2.0)
    assert bool((near.regions.arrays[0] == FREED).all())
    ended = sum(near.completed[batch] is not None for batch in posted)
    return f"{ended} of {len(posted)} batches ended early"


async def transport_checks(device: RdmaDevice) -> None:
    """One-sided operations between this process and one that does nothing but hold memory."""
    assert find_library("") == SYSTEM, "with an RDMA device, the system's UCX is the one to take"
    with near_end("ucx") as near, far_process("ucx") as far:
        await check("memory is registered natively", memory_is_registered(device, near))
        peer = near.transport.connect(far.description)
        await check("one-sided reads arrive", reads_arrive(device, near, peer))
        await check("one-sided writes arrive", writes_arrive(device, near, far, peer))
        await check("a fence ends what is in flight", a_fence_ends_what_is_in_flight(device, near, peer))


async def pages_are_read(device: RdmaDevice, consumer: Consumer) -> str:
    """Pages come byte for byte, and the ACKs release their sources."""
    pool = consumer.worker.pool
    for pid in (os.getpid(), consumer.producer.pid):
        assert pool.memory.length in device.registered_bytes(pid)
    num_bytes = 4 * BLOCKS * pool.block_bytes
    with carrying(device, num_bytes):
        readings = [await consumer.reading(seed) for seed in range(4)]
        outcomes = await settled(readings)
        assert outcomes == ["published"] * 4, [reading.outcomes for reading in readings]
    for seed, reading in enumerate(readings):
        assert pool.holds(reading.blocks, seed)
        pool.give_back(reading.blocks)
    await everything_released(consumer.producer)
    return f"{num_bytes} bytes in 4 transfers, exact; every source released by its ACK"


async def pages_are_written(device: RdmaDevice, consumer: Consumer) -> str:
    """Layer by layer while they are computed; the Commit that follows the flush publishes them."""
    pool = consumer.worker.pool
    num_bytes = 2 * BLOCKS * pool.block_bytes
    with carrying(device, num_bytes):
        receivings = [await started(consumer, seed) for seed in range(2)]
        for num_tokens in (50, TOKENS):
            for receiving in receivings:
                await compute(consumer, receiving, num_tokens)
        for seed, receiving in enumerate(receivings):
            await receiving.receive.landed()
            assert pool.holds(receiving.blocks, seed)
            pool.give_back(receiving.blocks)
    await everything_released(consumer.producer)
    return f"{num_bytes} bytes in 2 transfers, exact; every commit acknowledged"


async def a_producer_killed_under_writes_costs_nothing(consumer: Consumer) -> str:
    """SIGKILL in the middle of a WRITE: its blocks are free when it is known to be dead, and not before."""
    receivings = [await started(consumer, seed) for seed in range(4)]
    for receiving in receivings:
        await compute(consumer, receiving, 100)
    await consumer.producer.kill()
    assert set(await over(*receivings)) == {Reason.PEER_LOST}
    assert len(consumer.worker.pool.free) == NUM_BLOCKS
    return f"{len(receivings)} writes failed, every block is free"


async def a_killed_producer_costs_nothing(device: RdmaDevice, consumer: Consumer) -> str:
    """SIGKILL when many reads have begun: what fails, fails; every destination settles."""
    worker, pool = consumer.worker, consumer.worker.pool
    held = await sources(consumer, READS)
    before = device.packets_sent()
    readings = [Reading(worker, pull, source) for pull, source in held]
    while device.packets_sent() < before + FIRST_PACKETS:
        await asyncio.sleep(0)
    await consumer.producer.kill()
    outcomes = await settled(readings)
    assert set(outcomes) <= {"published", Reason.PEER_LOST, Reason.TRANSFER_ERROR}, outcomes
    failed = [outcome for outcome in outcomes if outcome != "published"]
    assert failed, "every read had ended before the producer was killed"
    for seed, reading in enumerate(readings):
        if reading.outcomes[0].outcome == "published":
            assert pool.holds(reading.blocks, seed)
            pool.give_back(reading.blocks)
    assert len(pool.free) == NUM_BLOCKS
    assert worker.connector.stats().imports_active == 0
    assert device.connections(os.getpid()) == ["ERR"]
    return f"{len(failed)} of {READS} reads failed, every block is free"


@asynccontextmanager
async def linked(worker: Worker) -> AsyncIterator[Consumer]:
    """The worker with a link to a fresh producer."""
    async with worker_process(new_engine_id("prefill-0"), CONFIG) as producer:
        link = await worker.connector.connect(producer.engine_id, producer.endpoint)
        assert link.transport == "ucx"
        yield Consumer(worker, producer, link)


async def connector_checks(device: RdmaDevice) -> None:
    """Hand-offs from two producers, one after the other, to this process's worker."""
    worker = wide_worker(new_engine_id("decode-0"), CONFIG)
    worker.pool.bytes[:] = FREED
    await worker.start()
    try:
        async with linked(worker) as consumer:
            await check("the connector hands pages over", pages_are_read(device, consumer))
            descriptors = len(os.listdir("/proc/self/fd"))
            await check("the connector has pages written", pages_are_written(device, consumer))
            await check("a producer killed during reads", a_killed_producer_costs_nothing(device, consumer))
        async with linked(worker) as consumer:
            await check("a fresh producer works again", pages_are_read(device, consumer))
            assert len(os.listdir("/proc/self/fd")) == descriptors
            await check("a producer killed under writes", a_producer_killed_under_writes_costs_nothing(consumer))
    finally:
        await worker.connector.close()
    assert worker.connector.failure is None
    assert len(worker.pool.free) == NUM_BLOCKS
    assert bool((worker.pool.bytes == FREED).all()), "something has written into a block that was free"


async def everything_is_given_back(device: RdmaDevice) -> str:
    """Of what the device holds for this process."""
    assert device.registered_bytes(os.getpid()) == []
    assert device.connections(os.getpid()) == []
    return "no memory is registered, no connection is left"


async def main() -> None:
    """Every check in its order; the first that fails ends the script with its traceback."""
    logging.basicConfig(level=logging.ERROR)  # that killed peers are lost is no news here
    device = only_device()
    await transport_checks(device)
    await connector_checks(device)
    await check("everything is given back", everything_is_given_back(device))


if __name__ == "__main__":
    asyncio.run(main())
