"""Every layout moved to every other, cell by cell."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from connector import LAYOUTS, PlanError, PoolGeometry, build_geometry
from connector.geometry import check_geometry
from connector.plan import plan_read
from tests.connector.geometries import EVERY, STATE, carry_out, cells, every_group, memory

NUM_TOKENS = 14


def ids(block_size: int, seed: int) -> dict[str, list[int]]:
    """Scattered and neighbouring blocks of every group for `NUM_TOKENS` tokens."""
    random = np.random.default_rng(seed)
    count = -(-NUM_TOKENS // block_size)
    start = int(random.integers(0, 12 - count + 1))
    return {
        "full": random.permutation(12)[:count].tolist(),
        "window": random.permutation(9)[: min(count, 2)].tolist(),
        "latent": list(range(start, start + count)),
        "state": [int(random.integers(0, 3))],
    }


@pytest.mark.parametrize("sizes", [(4, 4), (4, 6), (8, 2)])
@pytest.mark.parametrize(("there", "here"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_every_cell_arrives_where_it_belongs_and_nothing_else_changes(
    there: str, here: str, sizes: tuple[int, int]
) -> None:
    source, destination = every_group(there, sizes[0]), every_group(here, sizes[1])
    theirs, ours = ids(sizes[0], 1), ids(sizes[1], 2)
    tokens = min(len(theirs["window"]) * sizes[0] - (-NUM_TOKENS % sizes[0]), len(ours["window"]) * sizes[1])
    ours["window"] = ours["window"][: max(1, min(2, tokens // sizes[1]))]
    remote, local = memory(source, 3), memory(destination, 4)
    expected = [array.copy() for array in local]
    for group in destination.groups:
        copy_by_token(source, remote, theirs[group.name], destination, expected, ours[group.name], group.name)
    plan = plan_read(
        source=source, source_blocks=theirs, destination=destination, destination_blocks=ours, num_tokens=NUM_TOKENS
    )
    carry_out(plan.batches, "read", local, remote)
    if sizes[0] == sizes[1]:
        assert np.array_equal(local[0], expected[0])
    else:  # only the tokens themselves are moved
        for group in destination.groups:
            for layer in group.layers:
                for block in ours[group.name]:
                    assert np.array_equal(
                        cells(destination, local, group, layer.layer, block),
                        cells(destination, expected, group, layer.layer, block),
                    )
        assert plan.total_bytes < sum(array.nbytes for array in local)


def copy_by_token(
    source: PoolGeometry,
    remote: list[np.ndarray],
    theirs: list[int],
    destination: PoolGeometry,
    local: list[np.ndarray],
    ours: list[int],
    name: str,
) -> None:
    """One token at a time, from the definition."""
    there, here = source.group(name), destination.group(name)
    rows = source.tokens_per_block(there), destination.tokens_per_block(here)
    total = NUM_TOKENS if name != "state" else 1
    starts = [(-(-total // row) - len(blocks)) * row for row, blocks in zip(rows, (theirs, ours), strict=True)]
    whole = -(-total // rows[0]) * rows[0] if rows[0] == rows[1] else total
    for layer in here.layers:
        for token in range(starts[1], whole):
            at, to = token - starts[0], token - starts[1]
            page = cells(source, remote, there, layer.layer, theirs[at // rows[0]])
            target = cells(destination, local, here, layer.layer, ours[to // rows[1]])
            target[:, to % rows[1]] = page[:, at % rows[0]]


@pytest.mark.parametrize(
    ("layout", "runs"),
    [("LBNHC", 6), ("LBHNC", 6), ("BLNHC", 2), ("BLHNC", 2), ("LHBNC", 12), ("BHLNC", 2)],
)
def test_runs_of_two_blocks_that_lie_apart(layout: str, runs: int) -> None:
    """As the table of layouts says: three layers of two heads."""
    pool = build_geometry([EVERY[0]], layout=layout, block_size=4, num_blocks={"full": 12})
    plan = plan_read(
        source=pool, source_blocks={"full": [1, 5]}, destination=pool, destination_blocks={"full": [2, 9]}, num_tokens=8
    )
    assert plan.operations == runs


@pytest.mark.parametrize(("layout", "runs"), [("LBNHC", 3), ("BLHNC", 1), ("LHBNC", 6), ("BHLNC", 1)])
def test_neighbouring_blocks_merge(layout: str, runs: int) -> None:
    pool = build_geometry([EVERY[0]], layout=layout, block_size=4, num_blocks={"full": 12})
    plan = plan_read(
        source=pool, source_blocks={"full": [4, 5]}, destination=pool, destination_blocks={"full": [2, 3]}, num_tokens=8
    )
    assert plan.operations == runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_built_pool_is_possible_and_used_to_its_last_byte(layout: str) -> None:
    pool = every_group(layout, 4)
    check_geometry(pool, "ours")
    ends = [page.offset + pool.extent(group, page) for group in pool.groups for page in group.layers]
    assert max(ends) == pool.region_bytes[0]
    cut = msgspec.structs.replace(pool, region_bytes=(pool.region_bytes[0] - 1,))
    with pytest.raises(PlanError, match="ends at byte"):
        check_geometry(cut, "theirs")


def test_a_state_slot_packs_conv_then_ssm() -> None:
    (group,) = build_geometry([STATE], layout="BLHNC", block_size=4, num_blocks={"state": 3}).groups
    assert group.parts == (("conv", 0, 10), ("ssm", 16, 24))
    assert group.content_bytes == group.layers[0].page_bytes == 48
    assert [page.offset for page in group.layers] == [0, 48]
    assert {page.block_stride for page in group.layers} == {96}


def test_groups_that_share_pages_move_as_long_as_their_blocks_differ() -> None:
    """One storage, two groups, one pool of block ids: as hybrid allocators lay it out."""
    pool = build_geometry([EVERY[0]], layout="BLHNC", block_size=4, num_blocks={"full": 12})
    twin = msgspec.structs.replace(
        pool.groups[0],
        name="twin",
        kind="window",
        layers=tuple(msgspec.structs.replace(page, layer=page.layer + 10) for page in pool.groups[0].layers),
    )
    both = msgspec.structs.replace(pool, groups=(pool.groups[0], twin))
    source = {"full": [0, 1], "twin": [2]}
    plan = plan_read(
        source=both,
        source_blocks=source,
        destination=both,
        destination_blocks={"full": [3, 4], "twin": [7]},
        num_tokens=8,
    )
    assert plan.total_bytes == 3 * pool.region_bytes[0] // 12
    with pytest.raises(PlanError, match="overlap in the destination"):
        plan_read(
            source=both,
            source_blocks=source,
            destination=both,
            destination_blocks={"full": [3, 4], "twin": [4]},
            num_tokens=8,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_thousand_blocks_are_planned_as_arrays(layout: str) -> None:
    """No object per page: what is allocated is a handful of arrays."""
    group = msgspec.structs.replace(EVERY[0], layers=tuple(range(32)))
    pool = build_geometry([group], layout=layout, block_size=4, num_blocks={"full": 20_000})
    random = np.random.default_rng(1)
    theirs, ours = (random.permutation(20_000)[:10_000].tolist() for _ in range(2))
    plan = plan_read(
        source=pool,
        source_blocks={"full": theirs},
        destination=pool,
        destination_blocks={"full": ours},
        num_tokens=40_000,
    )
    assert plan.total_bytes == 10_000 * pool.region_bytes[0] // 20_000
    assert len(plan.batches) == 1
