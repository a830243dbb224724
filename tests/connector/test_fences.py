"""Fences that take their time: nothing is freed, and nobody waits who need not, before they have ended."""

from __future__ import annotations

import asyncio

import pytest

from connector import PeerLostError, Reason, new_transfer_id
from connector.errors import TransportError
from connector.transport.base import FENCE_TIMEOUT_S
from tests.clock import in_virtual_time, now, until
from tests.connector.cable import Cable
from tests.connector.fabric import Batch, Fabric, FabricTransport
from tests.connector.pair import Pair, Reading, Worker, connected
from tests.connector.pool import D, P


def slow_fences(pair: Pair) -> FabricTransport:
    """From now on fences end when the consumer's end of the fabric is told so."""
    pair.fabric.automatic_fences = False
    return pair.fabric.ends[pair.decode.end]


async def reading(pair: Pair) -> tuple[Reading, Batch]:
    """A read with its batch in flight."""
    _, pull, source = pair.source()
    read = Reading(pair.decode, pull, source)
    await until(lambda: len(pair.fabric.in_flight) == 1)
    return read, pair.fabric.in_flight[0]


def assert_owned(pair: Pair, read: Reading, batch: Batch) -> None:
    """The blocks are still the import's, and may be written."""
    assert read.outcomes == []
    assert len(pair.decode.pool.free) < 16
    batch.move(1)  # the custody sees it if the blocks were free


@in_virtual_time
async def test_the_blocks_of_a_read_are_its_own_until_the_fence_has_ended() -> None:
    async with connected(automatic=False) as pair:
        end = slow_fences(pair)
        read, batch = await reading(pair)
        pair.fabric.kill(pair.prefill.end)
        await asyncio.sleep(FENCE_TIMEOUT_S / 2)
        assert_owned(pair, read, batch)
        end.finish_fence(batch.peer)
        assert (await read.failure()).reason == Reason.PEER_LOST
        batch.move()
        assert len(pair.decode.pool.free) == 16


@in_virtual_time
async def test_nothing_is_begun_with_a_peer_that_is_being_fenced() -> None:
    """A WRITE that began then would be quarantined for ever: the death that would end it has been told of already."""
    async with connected(automatic=False) as pair:
        slow_fences(pair)
        pair.fabric.kill(pair.prefill.end)
        await until(lambda: pair.decode.count("peers_down") == 1)
        blocks = pair.decode.pool.take(1)
        with pytest.raises(PeerLostError):
            pair.decode.connector.receive(pair.link, new_transfer_id(), {"full": blocks}, 4, lambda outcome: None)
        pair.decode.pool.give_back(blocks)
        assert pair.decode.connector.stats().blocks_quarantined == 0


@in_virtual_time
async def test_the_loop_does_its_other_work_meanwhile() -> None:
    async with connected(automatic=False) as pair:
        end = slow_fences(pair)
        read, batch = await reading(pair)
        renewals = pair.prefill.count("renewals")
        batch.outlive()
        await until(lambda: pair.link.data_peer is None)
        _, pull, source = pair.source(seed=2)
        assert (await Reading(pair.decode, pull, source).failure()).reason == Reason.PEER_LOST
        await asyncio.sleep(FENCE_TIMEOUT_S * 0.9)
        assert pair.prefill.count("renewals") > renewals
        assert_owned(pair, read, batch)
        end.finish_fence(batch.peer)
        await read.failure()
        pair.fabric.automatic = pair.fabric.automatic_fences = True
        await until(lambda: pair.link.connected and pair.link.data_peer != ("fabric", batch.peer))
        _, pull, source = pair.source(seed=3)
        again = Reading(pair.decode, pull, source)
        await again.task
        assert pair.decode.pool.holds(again.blocks, 3)


@in_virtual_time
async def test_a_peer_that_has_ended_is_fenced_all_the_same() -> None:
    """That its process is gone says nothing of what this worker's own hardware still does."""
    async with connected(automatic=False) as pair:
        end = slow_fences(pair)
        read, batch = await reading(pair)
        pair.link.process_ended("another incarnation answers")
        await asyncio.sleep(FENCE_TIMEOUT_S / 2)
        assert_owned(pair, read, batch)
        pair.link.process_ended("and again")
        assert_owned(pair, read, batch)
        end.finish_fence(batch.peer)
        assert (await read.failure()).reason == Reason.PEER_LOST


@in_virtual_time
async def test_closing_a_link_waits_for_the_fence() -> None:
    async with connected(automatic=False) as pair:
        end = slow_fences(pair)
        read, batch = await reading(pair)
        closing = asyncio.create_task(pair.decode.connector.disconnect(pair.prefill.engine_id.name))
        await asyncio.sleep(FENCE_TIMEOUT_S / 2)
        assert not closing.done()
        assert_owned(pair, read, batch)
        end.finish_fence(batch.peer)
        await closing
        await read.failure()
        assert pair.all_free()


@in_virtual_time
async def test_a_fence_that_does_not_end_is_a_fault() -> None:
    fabric = Fabric(automatic=False)
    prefill, decode = Worker(P, fabric), Worker(D, fabric)
    await prefill.start()
    await decode.start()
    link = await decode.connector.connect(P, prefill.endpoint)
    pair = Pair(fabric, prefill, decode, Cable(prefill.endpoint), link)
    slow_fences(pair)
    read, batch = await reading(pair)
    batch.outlive()
    began = now()
    await until(lambda: decode.connector.failure is not None)
    assert now() - began >= FENCE_TIMEOUT_S
    failure = decode.connector.failure
    assert isinstance(failure, TransportError)
    assert f"fabric has not let go of peer {batch.peer} within 10 s" in str(failure)
    assert "(batch 1 was not over within 30 s); nothing can be said of the memory" in str(failure)
    await decode.connector.close()
    await prefill.connector.close()
    await read.failure()  # closing a transport waits for its fences
    assert len(decode.pool.free) == 16
