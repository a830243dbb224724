"""Who gets blocks, and when."""

from __future__ import annotations

import asyncio
import threading

import pytest

from decode.reservations import Reservations
from engine import BlockTable
from tests.block_pool import full_pool

DEADLINE_S = 20.0


class Pool:
    """Four blocks of one token, and a listener for blocks that have come back."""

    def __init__(self) -> None:
        self.blocks = full_pool(4, 1)
        self.open = True

    def reserve(self, owner: str, num_tokens: int) -> BlockTable | None:
        return self.blocks.allocate(owner, num_tokens) if self.open else None

    def free(self, table: BlockTable) -> None:
        self.blocks.free(table)


def made() -> tuple[Pool, Reservations]:
    pool = Pool()
    reservations = Reservations(pool)
    pool.blocks.on_freed(reservations.blocks_freed)
    return pool, reservations


async def waiting(reservations: Reservations, owner: str, num_tokens: int) -> asyncio.Task[BlockTable]:
    task = asyncio.create_task(reservations.reserve(owner, num_tokens, DEADLINE_S))
    await asyncio.sleep(0)  # it stands in the queue
    return task


async def test_free_blocks_are_had_at_once() -> None:
    pool, reservations = made()
    assert len((await reservations.reserve("a", 3, DEADLINE_S)).block_ids) == 3
    assert pool.blocks.num_free == 1


async def test_a_small_request_does_not_overtake_a_large_one() -> None:
    pool, reservations = made()
    first = await reservations.reserve("first", 3, DEADLINE_S)
    large = await waiting(reservations, "large", 4)
    small = await waiting(reservations, "small", 1)
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done()
    pool.free(first)
    table = await large
    assert not small.done()
    pool.free(table)
    assert (await small).owner == "small"


async def test_blocks_freed_on_another_thread_wake_the_queue() -> None:
    pool, reservations = made()
    first = await reservations.reserve("first", 4, DEADLINE_S)
    next_one = await waiting(reservations, "next", 4)
    thread = threading.Thread(target=pool.free, args=(first,))
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        assert (await next_one).owner == "next"
    thread.join()


async def test_a_cancelled_waiter_leaves_the_queue_and_the_next_is_served() -> None:
    pool, reservations = made()
    first = await reservations.reserve("first", 2, DEADLINE_S)
    large = await waiting(reservations, "large", 4)
    small = await waiting(reservations, "small", 2)
    large.cancel()
    async with asyncio.timeout(DEADLINE_S):
        table = await small
    pool.free(table)
    pool.free(first)
    assert large.cancelled()
    assert pool.blocks.num_free == 4


async def test_a_waiter_cancelled_in_the_moment_of_its_grant_gives_the_blocks_back() -> None:
    pool, reservations = made()
    first = await reservations.reserve("first", 4, DEADLINE_S)
    next_one = await waiting(reservations, "next", 4)
    pool.free(first)
    await asyncio.sleep(0)  # granted, but the waiter has not run yet
    assert pool.blocks.num_free == 0
    next_one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await next_one
    assert pool.blocks.num_free == 4
    pool.blocks.validate()


async def test_nobody_waits_longer_than_its_timeout() -> None:
    pool, reservations = made()
    first = await reservations.reserve("first", 4, DEADLINE_S)
    with pytest.raises(TimeoutError):
        await reservations.reserve("late", 1, 0.0)
    pool.free(first)
    assert (await reservations.reserve("next", 4, DEADLINE_S)).owner == "next"


async def test_a_closed_pool_grants_nothing_until_it_opens() -> None:
    pool, reservations = made()
    pool.open = False
    one = await waiting(reservations, "one", 1)
    assert not one.done()
    pool.open = True
    reservations.blocks_freed()
    async with asyncio.timeout(DEADLINE_S):
        assert (await one).owner == "one"
