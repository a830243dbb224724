"""From blocks to byte runs: what a transfer moves, as arrays.

Where a block of all layers is one contiguous run on both sides it is moved whole; otherwise there is one run per layer.
Runs are sorted by destination and merged where both sides are adjacent, so neighbouring blocks of a fresh pool cost one
operation. Nothing here makes a Python object per page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from connector.errors import PlanError
from connector.pages import LAYOUTS, GroupPages, PoolGeometry
from connector.transport.base import Offsets, Runs

MAX_REGION_BYTES = 1 << 56
"""Offsets are int64; far more than any pool, far less than an overflow."""


class PlannedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The runs between one pair of regions."""

    local_region: int
    remote_region: int
    runs: Runs


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one transfer moves. `blocks` are the destination's ids by group."""

    batches: tuple[PlannedBatch, ...]
    blocks: dict[str, Offsets]

    @property
    def total_bytes(self) -> int:
        """Bytes that the transfer moves."""
        return sum(batch.runs.total_bytes for batch in self.batches)

    @property
    def operations(self) -> int:
        """One-sided operations after merging."""
        return sum(len(batch.runs.length) for batch in self.batches)


class _Piece(msgspec.Struct, frozen=True):
    """Equal lengths between one pair of regions; offsets into each."""

    source_region: int
    destination_region: int
    source: Offsets
    destination: Offsets
    length: int


def plan_read(
    *,
    source: PoolGeometry,
    source_blocks: Mapping[str, Sequence[int]],
    destination: PoolGeometry,
    destination_blocks: Mapping[str, Sequence[int]],
    num_tokens: int,
) -> Plan:
    """READ the blocks of `num_tokens` tokens: the destination is local, the source is the peer's.

    Each side names exactly the blocks that hold these tokens, in their order; the last block is moved whole even if it
    is partly filled.

    Raises:
        PlanError: the geometries differ, or the blocks are not what each side's geometry and `num_tokens` allow.
    """
    _require_equal(source, destination)
    names = {group.name for group in destination.groups}
    if set(source_blocks) != names or set(destination_blocks) != names:
        raise PlanError(
            f"blocks must be given for the groups {sorted(names)}; the source has {sorted(source_blocks)}, "
            f"the destination {sorted(destination_blocks)}"
        )
    pieces: list[_Piece] = []
    blocks: dict[str, Offsets] = {}
    for group in destination.groups:
        theirs = check_blocks(source, group.name, source_blocks[group.name], num_tokens, whose="the source")
        ours = check_blocks(
            destination, group.name, destination_blocks[group.name], num_tokens, whose="the destination"
        )
        blocks[group.name] = ours
        pieces += _pieces(source.group(group.name), theirs, group, ours)
    return Plan(batches=_merge(pieces), blocks=blocks)


def check_blocks(
    geometry: PoolGeometry, group_name: str, block_ids: Sequence[int], num_tokens: int, *, whose: str
) -> Offsets:
    """The ids as an array, proved to be blocks of this pool that can hold exactly `num_tokens` tokens.

    Raises:
        PlanError: no tokens, another number of blocks, an id outside the pool, or one named twice.
    """
    needed = -(-num_tokens // geometry.block_size)
    if num_tokens < 1 or len(block_ids) != needed:
        raise PlanError(
            f"{whose} names {len(block_ids)} blocks of group {group_name!r} for {num_tokens} tokens; "
            f"{max(needed, 0)} blocks of {geometry.block_size} tokens hold them, and there must be at least one"
        )
    try:
        ids = np.array(block_ids, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise PlanError(f"{whose} names block ids of group {group_name!r} that are not integers: {error}") from error
    count = geometry.group(group_name).num_blocks
    outside = ids[(ids < 0) | (ids >= count)]
    if outside.size:
        raise PlanError(f"{whose} names block {outside[0]} of group {group_name!r}, which has {count} blocks")
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PlanError(f"{whose} names block {twice[0]} of group {group_name!r} twice")
    return ids


def check_geometry(geometry: PoolGeometry, whose: str) -> None:
    """Prove that every page of a pool lies inside its region, so that block arithmetic can be trusted.

    Raises:
        PlanError: with the first field that cannot be.
    """
    if geometry.layout not in LAYOUTS:
        raise PlanError(f"{whose} has the page layout {geometry.layout!r}; supported are {', '.join(LAYOUTS)}")
    if geometry.block_size < 1:
        raise PlanError(f"{whose} has blocks of {geometry.block_size} tokens")
    names = [group.name for group in geometry.groups]
    if not names or len(set(names)) != len(names):
        raise PlanError(f"{whose} must name each KV cache group once, it names {names}")
    if any(not 0 < length <= MAX_REGION_BYTES for length in geometry.region_bytes):
        raise PlanError(f"{whose} has regions of {geometry.region_bytes} bytes")
    for group in geometry.groups:
        if not group.layers:
            raise PlanError(f"{whose}: group {group.name!r} has no layers")
        for page in group.layers:
            where = f"{whose}: group {group.name!r}, layer {page.layer}"
            if page.num_blocks != group.num_blocks or page.num_blocks < 1:
                raise PlanError(f"{where} has {page.num_blocks} blocks, the group {group.num_blocks}")
            if not 0 <= page.region < len(geometry.region_bytes):
                raise PlanError(f"{where} is in region {page.region} of {len(geometry.region_bytes)}")
            if page.offset < 0 or page.page_bytes < 1 or page.block_stride < page.page_bytes:
                raise PlanError(
                    f"{where} has offset {page.offset}, page {page.page_bytes} bytes, stride {page.block_stride} bytes"
                )
            end = page.offset + (page.num_blocks - 1) * page.block_stride + page.page_bytes
            if end > geometry.region_bytes[page.region]:
                raise PlanError(f"{where} ends at byte {end} of {geometry.region_bytes[page.region]}")


def _require_equal(source: PoolGeometry, destination: PoolGeometry) -> None:
    """Pools may differ in size and place, never in what a block is."""
    differences = [
        f"{field}: source {theirs!r}, destination {ours!r}"
        for field, theirs, ours in (
            ("layout", source.layout, destination.layout),
            ("block_size", source.block_size, destination.block_size),
            ("groups", _pages(source), _pages(destination)),
        )
        if theirs != ours
    ]
    if differences:
        raise PlanError(f"the two pools' pages differ ({'; '.join(differences)})")


def _pages(geometry: PoolGeometry) -> dict[str, list[tuple[int, int]]]:
    return {group.name: [(page.layer, page.page_bytes) for page in group.layers] for group in geometry.groups}


def _pieces(source: GroupPages, theirs: Offsets, destination: GroupPages, ours: Offsets) -> list[_Piece]:
    if _block_is_one_run(source) and _block_is_one_run(destination):
        layers = [(source.layers[0], destination.layers[0])]
        lengths = [sum(page.page_bytes for page in destination.layers)]
    else:
        layers = list(zip(source.layers, destination.layers, strict=True))
        lengths = [page.page_bytes for page in destination.layers]
    return [
        _Piece(
            there.region,
            here.region,
            there.offset + theirs * there.block_stride,
            here.offset + ours * here.block_stride,
            length,
        )
        for (there, here), length in zip(layers, lengths, strict=True)
    ]


def _block_is_one_run(group: GroupPages) -> bool:
    """Whether the pages of one block follow each other without a gap, in the order of the layers."""
    return all(
        page.region == before.region
        and page.block_stride == before.block_stride
        and page.offset == before.offset + before.page_bytes
        for before, page in zip(group.layers, group.layers[1:], strict=False)
    )


def _merge(pieces: list[_Piece]) -> tuple[PlannedBatch, ...]:
    regions = sorted({(piece.destination_region, piece.source_region) for piece in pieces})
    return tuple(
        PlannedBatch(
            local_region=here,
            remote_region=there,
            runs=_merge_runs([p for p in pieces if (p.destination_region, p.source_region) == (here, there)]),
        )
        for here, there in regions
    )


def _merge_runs(pieces: list[_Piece]) -> Runs:
    local = np.concatenate([piece.destination for piece in pieces])
    remote = np.concatenate([piece.source for piece in pieces])
    length = np.concatenate([np.full(len(piece.source), piece.length, dtype=np.int64) for piece in pieces])
    order = np.argsort(local)
    local, remote, length = local[order], remote[order], length[order]
    ends = local + length
    if np.any(ends[:-1] > local[1:]):
        raise PlanError("pages of different layers or groups overlap in the destination; its geometry is wrong")
    joins = (ends[:-1] == local[1:]) & (remote[:-1] + length[:-1] == remote[1:])
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    return Runs(local=local[starts], remote=remote[starts], length=np.add.reduceat(length, starts))
