"""Destination blocks are freed exactly when nobody wants them and nothing writes into them."""

from __future__ import annotations

from typing import Literal

import pytest

from connector import ImportOutcome
from decode.landing import Landing
from engine.blocks import BlockPool, BlockTable
from tests.block_pool import full_pool

Outcome = Literal["published", "failed", "cancelled"]


def outcome(which: Outcome) -> ImportOutcome:
    return ImportOutcome(transfer_id="t", outcome=which, reason="", detail="")


def made() -> tuple[BlockPool, BlockTable, Landing]:
    pool = full_pool(2, 1)
    table = pool.allocate("r", 2)
    assert table is not None
    return pool, table, Landing(table, pool.free)


def test_published_pages_belong_to_the_request() -> None:
    pool, table, landing = made()
    landing.on_settled(outcome("published"))
    assert landing.take() is table
    assert pool.num_free == 0


@pytest.mark.parametrize("which", ["failed", "cancelled"])
def test_pages_that_did_not_come_are_freed_when_the_import_has_settled(which: Outcome) -> None:
    pool, _, landing = made()
    landing.on_settled(outcome(which))
    assert pool.num_free == 2
    landing.abandon()
    assert pool.num_free == 2
    pool.validate()


@pytest.mark.parametrize("which", ["published", "failed", "cancelled"])
def test_an_abandoned_import_keeps_its_blocks_until_it_settles(which: Outcome) -> None:
    pool, _, landing = made()
    landing.abandon()
    assert pool.num_free == 0
    landing.on_settled(outcome(which))
    assert pool.num_free == 2


def test_pages_that_came_for_nobody_are_freed() -> None:
    pool, _, landing = made()
    landing.on_settled(outcome("published"))
    landing.abandon()
    assert pool.num_free == 2
