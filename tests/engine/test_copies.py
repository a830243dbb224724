"""Copies of blocks and slots, in every layout."""

from __future__ import annotations

import pytest
import torch

from connector.pages import LAYOUTS
from engine.copies import BlockCopier
from engine.page_work import BlockCopy
from tests.engine.page_bytes import bytes_of, geometry_of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_blocks_are_copied_and_nothing_else(layout: str) -> None:
    geometry = geometry_of(layout)
    memory = torch.randint(0, 256, (geometry.region_bytes[0],), dtype=torch.uint8)
    expected = memory.clone()
    copies = [("full", 1, 4), ("s", 2, 0), ("full", 0, 3), ("w", 3, 1)]
    for name, source, destination in copies:
        expected[bytes_of(geometry, name, destination)] = memory[bytes_of(geometry, name, source)]
    BlockCopier(geometry, memory).copy(
        [BlockCopy(group=name, source=source, destination=destination) for name, source, destination in copies]
    )
    assert torch.equal(memory, expected)


def test_a_block_that_is_read_and_written_is_read_first() -> None:
    geometry = geometry_of("BLHNC")
    memory = torch.randint(0, 256, (geometry.region_bytes[0],), dtype=torch.uint8)
    first, second = memory[bytes_of(geometry, "s", 0)], memory[bytes_of(geometry, "s", 1)]
    BlockCopier(geometry, memory).copy(
        [BlockCopy(group="s", source=0, destination=1), BlockCopy(group="s", source=1, destination=0)]
    )
    assert torch.equal(memory[bytes_of(geometry, "s", 0)], second)
    assert torch.equal(memory[bytes_of(geometry, "s", 1)], first)


def test_nothing_to_copy() -> None:
    geometry = geometry_of("BLHNC")
    memory = torch.ones(geometry.region_bytes[0], dtype=torch.uint8)
    BlockCopier(geometry, memory).copy([])
    assert bool((memory == 1).all())
