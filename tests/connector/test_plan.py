from __future__ import annotations

import msgspec
import numpy as np
import pytest

from connector import GroupPages, GroupSpec, LayerPages, PlanError, PoolGeometry, build_geometry
from connector.geometry import check_geometry
from connector.plan import Plan, plan_read

GROUP = GroupSpec(name="full", layers=(0, 1), num_kv_heads=2, key_dim=4, value_dim=4, itemsize=2)
PAGE = 2 * 4 * 8 * 2
BLOCK = 2 * PAGE
"""Blocks of 4 tokens, two layers."""


def pool(num_blocks: int = 8) -> PoolGeometry:
    return build_geometry([GROUP], layout="BLHNC", block_size=4, num_blocks={"full": num_blocks})


def by_layer(num_blocks: int = 8, gap: int = 0) -> PoolGeometry:
    """The same pages, in one region per layer; `gap` bytes lie between the pages of a layer."""
    stride = PAGE + gap
    return PoolGeometry(
        layout="BLHNC",
        block_size=4,
        region_bytes=(stride * num_blocks, stride * num_blocks),
        groups=(
            GroupPages(
                name="full",
                kind="full",
                num_blocks=num_blocks,
                num_heads=2,
                content_bytes=16,
                layers=tuple(
                    LayerPages(
                        layer=layer,
                        region=layer,
                        offset=0,
                        page_bytes=PAGE,
                        block_stride=stride,
                        num_blocks=num_blocks,
                        head_stride=PAGE // 2,
                        token_stride=16,
                    )
                    for layer in (0, 1)
                ),
            ),
        ),
    )


def plan(
    source: list[int],
    destination: list[int],
    num_tokens: int | None = None,
    *,
    there: PoolGeometry | None = None,
    here: PoolGeometry | None = None,
) -> Plan:
    return plan_read(
        source=there or pool(),
        source_blocks={"full": source},
        destination=here or pool(),
        destination_blocks={"full": destination},
        num_tokens=4 * len(destination) if num_tokens is None else num_tokens,
    )


def runs(planned: Plan) -> list[tuple[int, int, int]]:
    (batch,) = planned.batches
    assert (batch.local_region, batch.remote_region) == (0, 0)
    return list(zip(batch.runs.local.tolist(), batch.runs.remote.tolist(), batch.runs.length.tolist(), strict=True))


def test_a_block_of_all_layers_is_one_run() -> None:
    planned = plan([5], [2])
    assert runs(planned) == [(2 * BLOCK, 5 * BLOCK, BLOCK)]
    assert (planned.total_bytes, planned.operations) == (BLOCK, 1)


def test_blocks_adjacent_on_both_sides_are_one_run() -> None:
    assert runs(plan([4, 5, 6], [1, 2, 3])) == [(BLOCK, 4 * BLOCK, 3 * BLOCK)]


def test_blocks_adjacent_on_one_side_only_are_not_merged() -> None:
    assert runs(plan([4, 6, 7], [1, 2, 3])) == [(BLOCK, 4 * BLOCK, BLOCK), (2 * BLOCK, 6 * BLOCK, 2 * BLOCK)]
    assert runs(plan([4, 5], [1, 3])) == [(BLOCK, 4 * BLOCK, BLOCK), (3 * BLOCK, 5 * BLOCK, BLOCK)]


def test_runs_are_sorted_by_destination_and_merged_whatever_the_order_of_the_tokens() -> None:
    assert runs(plan([7, 5, 6], [3, 1, 2])) == [(BLOCK, 5 * BLOCK, 3 * BLOCK)]
    assert runs(plan([1, 2], [2, 1])) == [(BLOCK, 2 * BLOCK, BLOCK), (2 * BLOCK, BLOCK, BLOCK)]


def test_the_last_block_is_moved_whole() -> None:
    assert plan([0, 1, 2], [0, 1, 2], num_tokens=9).total_bytes == 3 * BLOCK


def test_pools_may_differ_in_size() -> None:
    assert runs(plan([99], [0], there=pool(100), here=pool(1))) == [(0, 99 * BLOCK, BLOCK)]


def test_pages_that_lie_apart_on_one_side_move_layer_by_layer() -> None:
    planned = plan([1, 2], [5, 6], there=by_layer())
    assert [(batch.local_region, batch.remote_region) for batch in planned.batches] == [(0, 0), (0, 1)]
    assert planned.batches[0].runs.local.tolist() == [5 * BLOCK, 6 * BLOCK]
    assert planned.batches[1].runs.local.tolist() == [5 * BLOCK + PAGE, 6 * BLOCK + PAGE]
    assert planned.batches[1].runs.remote.tolist() == [PAGE, 2 * PAGE]
    assert planned.total_bytes == 2 * BLOCK


def test_pages_of_one_layer_merge_where_they_touch() -> None:
    touching = plan([1, 2], [5, 6], there=by_layer(), here=by_layer())
    assert [batch.runs.length.tolist() for batch in touching.batches] == [[2 * PAGE], [2 * PAGE]]
    apart = plan([1, 2], [5, 6], there=by_layer(gap=64), here=by_layer(gap=64))
    assert [batch.runs.length.tolist() for batch in apart.batches] == [[PAGE, PAGE], [PAGE, PAGE]]


def test_every_page_arrives_where_it_belongs() -> None:
    random = np.random.default_rng(5)
    for there, here in ((pool(40), pool(30)), (by_layer(40), pool(30)), (pool(40), by_layer(30, gap=8))):
        theirs = random.permutation(40)[:20].tolist()
        ours = random.permutation(30)[:20].tolist()
        source = [random.integers(0, 256, length, dtype=np.uint8) for length in there.region_bytes]
        destination = [np.zeros(length, dtype=np.uint8) for length in here.region_bytes]
        for batch in plan(theirs, ours, there=there, here=here).batches:
            for local, remote, length in zip(batch.runs.local, batch.runs.remote, batch.runs.length, strict=True):
                read = source[batch.remote_region][remote : remote + length]
                destination[batch.local_region][local : local + length] = read
        for layer in (0, 1):
            a, b = there.groups[0].layers[layer], here.groups[0].layers[layer]
            for from_block, to_block in zip(theirs, ours, strict=True):
                start, end = a.offset + from_block * a.block_stride, b.offset + to_block * b.block_stride
                assert np.array_equal(source[a.region][start : start + PAGE], destination[b.region][end : end + PAGE])


# Refusals


@pytest.mark.parametrize(
    ("source", "destination", "num_tokens", "message"),
    [
        ([8], [0], 4, "the source names block 8 of group 'full', which has 8 blocks"),
        ([0], [8], 4, "the destination names block 8 of group 'full', which has 8 blocks"),
        ([-1], [0], 4, "the source names block -1"),
        ([0, 1], [3, 3], 8, "the destination names block 3 of group 'full' twice"),
        ([3, 3], [0, 1], 8, "the source names block 3 of group 'full' twice"),
        (
            [0, 1],
            [0, 1, 2],
            9,
            "the source names 2 blocks of group 'full' for tokens 0 to 9; 3 blocks of 4 tokens hold them",
        ),
        (
            [0, 1, 2],
            [0],
            8,
            "the source names 3 blocks of group 'full' for tokens 0 to 8; 2 blocks of 4 tokens hold them",
        ),
        ([0, 1], [0, 1, 2], 8, "the destination names 3 blocks"),
        ([0, 1], [0], 8, "the destination names 1 blocks"),
        ([], [], 0, "there must be at least one"),
        ([0], [0], -3, "there must be at least one"),
        ([1 << 70], [0], 4, "not integers"),
    ],
)
def test_blocks_that_cannot_be_are_refused(
    source: list[int], destination: list[int], num_tokens: int, message: str
) -> None:
    with pytest.raises(PlanError) as refused:
        plan(source, destination, num_tokens)
    assert message in str(refused.value)


def test_groups_must_be_the_same() -> None:
    with pytest.raises(PlanError, match=r"groups \['full'\]; the source has \['window'\], the destination \['full'\]"):
        plan_read(
            source=pool(),
            source_blocks={"window": [0]},
            destination=pool(),
            destination_blocks={"full": [0]},
            num_tokens=4,
        )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (msgspec.structs.replace(GROUP, num_kv_heads=4), "groups.full.num_heads: source 4, destination 2"),
        (msgspec.structs.replace(GROUP, itemsize=4), "groups.full.content_bytes: source 32, destination 16"),
        (
            msgspec.structs.replace(GROUP, layers=(0, 1, 2)),
            r"groups.full.layers: source \[0, 1, 2\], destination \[0, 1\]",
        ),
        (msgspec.structs.replace(GROUP, kind="window"), "groups.full.kind: source 'window', destination 'full'"),
        (msgspec.structs.replace(GROUP, name="other"), r"groups: source \['other'\], destination \['full'\]"),
    ],
)
def test_what_a_token_is_must_be_the_same(other: GroupSpec, message: str) -> None:
    there = build_geometry([other], layout="BLHNC", block_size=4, num_blocks={other.name: 8})
    with pytest.raises(PlanError, match=message):
        plan([0], [0], there=there)


# A peer's geometry is not to be trusted


def changed(**changes: object) -> PoolGeometry:
    geometry = pool()
    group = geometry.groups[0]
    layers = tuple(msgspec.structs.replace(layer, **changes) for layer in group.layers)
    return msgspec.structs.replace(geometry, groups=(msgspec.structs.replace(group, layers=layers),))


def of_group(**changes: object) -> PoolGeometry:
    return msgspec.structs.replace(pool(), groups=(msgspec.structs.replace(pool().groups[0], **changes),))


def test_a_real_geometry_is_accepted() -> None:
    check_geometry(pool(), "peer")
    check_geometry(by_layer(gap=16), "peer")


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (changed(region=1), "is in region 1 of 1"),
        (changed(region=-1), "is in region -1 of 1"),
        (changed(offset=BLOCK), f"ends at byte {8 * BLOCK + PAGE} of {8 * BLOCK}"),
        (changed(offset=-1), "has offset -1"),
        (changed(block_stride=15), "strides (15, 64, 16)"),
        (changed(token_stride=0), "strides (256, 64, 0)"),
        (changed(head_stride=-1), "strides (256, -1, 16)"),
        (changed(page_bytes=0), "has pages of 0 bytes, but 2 heads x 4 tokens x 16 bytes are 128"),
        (changed(num_blocks=9), "has 9 blocks, the group 8"),
        (msgspec.structs.replace(pool(), region_bytes=(1 << 60,)), "regions of"),
        (msgspec.structs.replace(pool(), layout="BLHCN"), "layout 'BLHCN'; supported are LBNHC"),
        (msgspec.structs.replace(pool(), block_size=0), "blocks of 0 tokens"),
        (msgspec.structs.replace(pool(), groups=()), "must name each KV cache group once"),
        (msgspec.structs.replace(pool(), groups=pool().groups * 2), "must name each KV cache group once"),
        (of_group(layers=()), "has no layers"),
        (of_group(num_heads=0), "has 0 heads of 16 bytes a token"),
        (of_group(parts=(("conv", 0, 8), ("ssm", 4, 4))), "ssm of group 'full' takes bytes 4 to 8"),
        (of_group(parts=(("conv", 0, 17),)), "conv of group 'full' takes bytes 0 to 17 of a slot of 16"),
    ],
)
def test_an_impossible_geometry_is_refused(geometry: PoolGeometry, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        check_geometry(geometry, "peer")
    assert message in str(refused.value)


def test_a_destination_whose_pages_overlap_is_refused() -> None:
    group = pool().groups[0]
    layers = (group.layers[0], msgspec.structs.replace(group.layers[1], offset=16))
    geometry = of_group(layers=layers)
    with pytest.raises(PlanError, match="overlap in the destination"):
        plan([0], [0], there=pool(), here=geometry)


def test_layers_that_share_their_pages_move_once() -> None:
    shared = changed(offset=0)
    assert plan([0, 3], [1, 5], there=shared, here=shared).total_bytes == 2 * PAGE
