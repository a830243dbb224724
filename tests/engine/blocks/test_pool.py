"""Every block is free or held by as many tables as it says."""

from __future__ import annotations

import random

import pytest

from engine.blocks import BlockTable
from engine.errors import BlockError
from tests.block_pool import full_pool


def test_blocks_are_handed_out_lowest_first_in_runs() -> None:
    pool = full_pool(8, 16)
    first, second = pool.allocate("a", 33), pool.allocate("b", 16)
    assert first is not None
    assert second is not None
    assert (first.block_ids, second.block_ids, pool.num_free) == ([0, 1, 2], [3], 4)
    pool.free(first)
    again = pool.allocate("c", 48)
    assert again is not None
    assert again.block_ids == [0, 1, 2]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert full_pool(1, 16).blocks_for(tokens) == blocks


def test_all_or_nothing() -> None:
    pool = full_pool(4, 2)
    assert pool.allocate("much", 9) is None
    table = pool.allocate("some", 4)
    assert table is not None
    assert not pool.extend(table, 9)
    assert (table.block_ids, pool.num_free) == ([0, 1], 2)
    assert pool.extend(table, 8)
    assert pool.extend(table, 3)
    assert (table.block_ids, pool.num_free) == ([0, 1, 2, 3], 0)


def test_freeing_twice_is_harmless_and_told_once() -> None:
    pool = full_pool(4, 2)
    told: list[int] = []
    pool.on_freed(lambda: told.append(pool.num_free))
    table = pool.allocate("a", 5)
    assert table is not None
    pool.free(table)
    pool.free(table)
    assert told == [4]
    with pytest.raises(BlockError, match="a extends a block table that it has freed"):
        pool.extend(table, 6)
    pool.validate()


def test_a_listener_that_raises_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    pool = full_pool(4, 2)
    told: list[int] = []

    def careless() -> None:
        raise RuntimeError("no loop any more")

    pool.on_freed(careless)
    pool.on_freed(lambda: told.append(pool.num_free))
    table = pool.allocate("a", 5)
    assert table is not None
    pool.free(table)
    assert told == [4]
    assert "no loop any more" in caplog.text


def test_foreign_blocks_are_not_freed() -> None:
    pool = full_pool(4, 2)
    table = pool.allocate("owner", 4)
    with pytest.raises(BlockError, match=r"thief frees \{'full': \[0, 3\]\}, which belong to somebody else"):
        pool.free(BlockTable("thief", {"full": [0, 3]}))
    pool.validate()
    assert pool.num_free == 2
    assert table is not None
    pool.free(table)
    assert pool.num_free == 4


def test_validate_finds_what_is_wrong() -> None:
    pool = full_pool(4, 2)
    table = pool.allocate("owner", 4)
    assert table is not None
    table.block_ids.pop()
    with pytest.raises(BlockError, match="block 1 of 'full' has 1 holders, 0 found"):
        pool.validate()


def test_any_sequence_of_operations_keeps_the_books() -> None:
    chance = random.Random(1)
    pool = full_pool(20, 4)
    tables: list[BlockTable] = []
    for _ in range(2000):
        kind = chance.randrange(3)
        if kind == 0:
            table = pool.allocate("x", chance.randrange(30))
            if table is not None:
                tables.append(table)
        elif tables and kind == 1:
            pool.extend(chance.choice(tables), chance.randrange(60))
        elif tables:
            pool.free(tables.pop(chance.randrange(len(tables))))
        pool.validate()
        assert pool.num_free == 20 - sum(len(table.block_ids) for table in tables)
