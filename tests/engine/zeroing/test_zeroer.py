"""Blocks are zeroed whole, in every layout, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from connector.pages import LAYOUTS
from engine.zeroing.zeroer import Zeroer
from tests.engine.page_bytes import bytes_of, filled, geometry_of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [{}, {"full": []}, {"full": [3]}, {"full": [4, 0], "w": [1, 2, 3]}, {"w": [2]}])
def test_these_blocks_and_no_other_byte(layout: str, blocks: dict[str, list[int]]) -> None:
    geometry = geometry_of(layout)
    memory = filled(geometry)
    expected = memory.clone()
    for name, ids in blocks.items():
        for block in ids:
            expected[bytes_of(geometry, name, block)] = 0
    Zeroer(geometry, memory).zero(blocks)
    assert torch.equal(memory, expected)


def test_states_are_left_alone() -> None:
    geometry = geometry_of("BLHNC")
    memory = filled(geometry)
    Zeroer(geometry, memory).zero({"s": [0, 1]})
    assert torch.equal(memory, filled(geometry))


def padded_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int) -> torch.Tensor:
    """As kernels with fixed shapes do it: the whole last block is read, and what is not there is masked."""
    scores = (keys @ query).masked_fill(torch.arange(len(keys)) >= length, -torch.inf)
    return scores.softmax(0) @ values


@pytest.mark.parametrize("zeroing", [True, False])
def test_stale_bits_poison_masked_attention_unless_they_are_zeroed(zeroing: bool) -> None:
    geometry = geometry_of("BLHNC")
    memory = torch.full((geometry.region_bytes[0] // 4,), torch.nan).view(torch.uint8)
    if zeroing:
        Zeroer(geometry, memory).zero({"w": [1]})
    (layer,) = geometry.group("w").layers
    cells = memory.view(torch.float32).as_strided(
        (3, 4), (layer.token_stride // 4, 1), (layer.offset + layer.block_stride) // 4
    )
    written = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.5, -1.0, 2.0, 7.0]])
    cells[:2] = written
    query = torch.tensor([0.3, 0.7])
    attended = padded_attention(query, cells[:, :2], cells[:, 2:], 2)
    exact = (written[:, :2] @ query).softmax(0) @ written[:, 2:]
    if zeroing:
        assert torch.equal(attended, exact)
    else:
        assert torch.isnan(attended).all()
