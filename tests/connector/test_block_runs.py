"""The bytes of a block as runs."""

from __future__ import annotations

import pytest

from connector.pages import LAYOUTS, BlockRun, GroupSpec, StateSpec, block_runs, build_geometry

GROUP = GroupSpec(name="full", layers=(0, 1, 2), num_kv_heads=2, key_dim=3, value_dim=1, itemsize=2)
PAGE = 2 * 5 * 8
NUM_BLOCKS = 4


@pytest.mark.parametrize(
    ("layout", "count", "num_bytes"),
    [
        ("LBNHC", 3, PAGE),
        ("LBHNC", 3, PAGE),
        ("BLNHC", 1, 3 * PAGE),
        ("BLHNC", 1, 3 * PAGE),
        ("LHBNC", 6, PAGE // 2),
        ("BHLNC", 1, 3 * PAGE),
    ],
)
def test_the_fewest_runs(layout: str, count: int, num_bytes: int) -> None:
    geometry = build_geometry([GROUP], layout=layout, block_size=5, num_blocks={"full": NUM_BLOCKS})
    runs = block_runs(geometry, geometry.groups[0])
    assert [run.num_bytes for run in runs] == [num_bytes] * count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_all_of_the_group_and_do_not_overlap(layout: str) -> None:
    state = StateSpec(name="s", layers=(3, 4), conv_bytes=6, ssm_bytes=8, conv_dtype="float32", ssm_dtype="float32")
    geometry = build_geometry([GROUP, state], layout=layout, block_size=5, num_blocks={"full": NUM_BLOCKS, "s": 3})
    taken: set[int] = set()
    for group in geometry.groups:
        count = 0
        for block in range(group.num_blocks):
            for run in block_runs(geometry, group):
                begin = run.offset + block * run.block_stride
                count += run.num_bytes
                taken.update(range(begin, begin + run.num_bytes))
        assert count == sum(layer.page_bytes for layer in group.layers) * group.num_blocks
    assert len(taken) == sum(layer.page_bytes * g.num_blocks for g in geometry.groups for layer in g.layers)


def test_of_layers_at_one_address_the_widest_page_counts() -> None:
    geometry = build_geometry([GROUP], layout="LBNHC", block_size=5, num_blocks={"full": NUM_BLOCKS})
    (group,) = geometry.groups
    import msgspec

    first, second, third = group.layers
    shared = msgspec.structs.replace(second, offset=first.offset, token_stride=8, head_stride=40)
    narrow = msgspec.structs.replace(group, layers=(shared, first, third))
    assert block_runs(geometry, narrow) == [
        BlockRun(first.offset, PAGE, PAGE),
        BlockRun(third.offset, PAGE, PAGE),
    ]
