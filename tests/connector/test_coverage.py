"""Which blocks a transfer writes completely."""

from __future__ import annotations

import random

import numpy as np
import pytest

from connector.coverage import covered_blocks
from connector.pages import LAYOUTS, GroupPages, GroupSpec, PoolGeometry, StateSpec, build_geometry

BLOCK_SIZE = 3


def pool(layout: str) -> PoolGeometry:
    attention = GroupSpec(name="full", layers=(0, 2), num_kv_heads=2, key_dim=3, value_dim=1, itemsize=2)
    window = GroupSpec(name="w", layers=(1,), num_kv_heads=1, key_dim=2, value_dim=2, itemsize=4, kind="window")
    state = StateSpec(name="s", layers=(3,), conv_bytes=10, ssm_bytes=20, conv_dtype="float32", ssm_dtype="float32")
    return build_geometry(
        [attention, window, state], layout=layout, block_size=BLOCK_SIZE, num_blocks={"full": 5, "w": 4, "s": 3}
    )


def cells(geometry: PoolGeometry, group: GroupPages, block: int) -> list[tuple[int, int]]:
    """Every cell of a block: where it starts, and its length."""
    return [
        (
            layer.offset + block * layer.block_stride + head * layer.head_stride + token * layer.token_stride,
            group.content_bytes,
        )
        for layer in group.layers
        for head in range(group.num_heads)
        for token in range(geometry.tokens_per_block(group))
    ]


def covered(geometry: PoolGeometry, group: GroupPages, blocks: list[int], ranges: list[tuple[int, int]]) -> set[int]:
    offsets = np.array([offset for offset, _ in ranges], dtype=np.int64)
    lengths = np.array([length for _, length in ranges], dtype=np.int64)
    return set(covered_blocks(geometry, group, blocks, offsets, lengths))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["full", "w", "s"])
def test_a_block_is_covered_by_all_of_its_cells_in_any_order_and_by_nothing_less(layout: str, name: str) -> None:
    chance = random.Random(1)
    geometry = pool(layout)
    group = geometry.group(name)
    written = [*cells(geometry, group, 0), *cells(geometry, group, 2)]
    chance.shuffle(written)
    assert covered(geometry, group, [0, 1, 2], written) == {0, 2}
    assert covered(geometry, group, [2], written) == {2}
    for missing in range(len(written)):
        lost = written[:missing] + written[missing + 1 :]
        whose = {block for block in (0, 2) if written[missing] not in cells(geometry, group, block)}
        assert covered(geometry, group, [0, 1, 2], lost) == whose
        offset, length = written[missing]
        assert covered(geometry, group, [0, 2], [*lost, (offset, length - 1)]) == whose
        assert covered(geometry, group, [0, 2], [*lost, (offset + 1, length - 1)]) == whose
        assert covered(geometry, group, [0, 2], [*lost, (offset, 1), (offset, length), (offset + 1, 1)]) == {0, 2}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_whose_last_tokens_are_not_written_is_not_covered(layout: str) -> None:
    geometry = pool(layout)
    group = geometry.group("full")
    filled = [
        (layer.offset + layer.block_stride + head * layer.head_stride + token * layer.token_stride, group.content_bytes)
        for layer in group.layers
        for head in range(2)
        for token in range(BLOCK_SIZE - 1)
    ]
    assert covered(geometry, group, [0, 1], [*cells(geometry, group, 0), *filled]) == {0}


def test_nothing_written_covers_nothing() -> None:
    geometry = pool("BLHNC")
    assert covered(geometry, geometry.group("full"), [0, 1], []) == set()
    assert covered(geometry, geometry.group("full"), [], [(0, 10**6)]) == set()
