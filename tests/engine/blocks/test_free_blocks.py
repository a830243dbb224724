"""The order in which free blocks are taken."""

from __future__ import annotations

from engine.blocks.free_blocks import FreeBlocks


def test_plain_blocks_first_then_new_ones_then_the_longest_unused() -> None:
    free = FreeBlocks(5)
    assert [free.take() for _ in range(4)] == [(0, False), (1, False), (2, False), (3, False)]
    free.put(0, cached=True)
    free.put(2, cached=False)
    free.put(1, cached=True)
    assert (len(free), free.num_cached) == (4, 2)
    assert [free.take() for _ in range(4)] == [(2, False), (4, False), (0, True), (1, True)]
    assert len(free) == 0


def test_a_block_that_is_asked_for_is_not_the_oldest_any_more() -> None:
    free = FreeBlocks(2)
    free.take()
    free.take()
    free.put(0, cached=True)
    free.put(1, cached=True)
    free.take_cached(0)
    assert 0 not in free
    free.put(0, cached=True)
    assert [free.take(), free.take()] == [(1, True), (0, True)]


def test_a_huge_pool_is_not_written_down() -> None:
    free = FreeBlocks(10**12)
    assert free.take() == (0, False)
    assert len(free) == 10**12 - 1
    assert 10**12 - 1 in free
    assert 10**12 not in free
