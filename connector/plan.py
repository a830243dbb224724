"""From blocks to byte runs: what a transfer moves, as arrays.

A page is a box of cells (see `connector.pages`), so that a transfer between two pools is a copy between two strided
arrays. Dimensions that are contiguous on both sides are folded into the run: whole pages where both layouts have their
cells in the same order, whole blocks where a block of all layers is one run on both sides, and neighbouring blocks.
What is left is expanded by broadcasting; nothing here makes a Python object per page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from connector.correspondence import Chunks, Correspondence
from connector.errors import PlanError
from connector.geometry import require_alike
from connector.pages import GroupPages, LayerPages, PoolGeometry
from connector.transport.base import Offsets, Op, Runs


class PlannedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The runs between one pair of regions."""

    local_region: int
    remote_region: int
    runs: Runs


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a READ moves, of `num_tokens` tokens. `blocks` are the destination's ids by group."""

    batches: tuple[PlannedBatch, ...]
    blocks: dict[str, Offsets]
    num_tokens: int

    @property
    def total_bytes(self) -> int:
        """Bytes that the transfer moves."""
        return sum(batch.runs.total_bytes for batch in self.batches)

    @property
    def operations(self) -> int:
        """One-sided operations after merging."""
        return sum(len(batch.runs.length) for batch in self.batches)


class _Piece(msgspec.Struct, frozen=True):
    """Runs between one pair of regions, sorted by destination as far as their making allows."""

    source_region: int
    destination_region: int
    source: Offsets
    destination: Offsets
    length: Offsets


def plan_read(
    *,
    source: PoolGeometry,
    source_blocks: Mapping[str, Sequence[int]],
    destination: PoolGeometry,
    destination_blocks: Mapping[str, Sequence[int]],
    num_tokens: int,
    local_tokens: int = 0,
) -> Plan:
    """READ what the destination lacks of `num_tokens` tokens: the destination is local, the source is the peer's.

    Each side names blocks in the order of the tokens, the last of which holds the last token. The destination has the
    first `local_tokens` already and leaves their blocks out. Where block sizes are equal the last block is moved whole
    even if it is partly filled.

    Raises:
        PlanError: the pages are not alike, or the blocks are not what each side's geometry and `num_tokens` allow.
    """
    pairs = correspond(source, source_blocks, destination, destination_blocks, num_tokens, local_tokens)
    pieces: list[_Piece] = []
    for name, pair in pairs.items():
        theirs, ours = source.group(name), destination.group(name)
        for chunks in pair.chunks(0, pair.num_tokens):
            pieces += pieces_of(theirs, ours, chunks, range(len(ours.layers)))
    return Plan(
        batches=merged(pieces, "read"),
        blocks={name: pair.destination for name, pair in pairs.items()},
        num_tokens=num_tokens - local_tokens,
    )


def correspond(
    source: PoolGeometry,
    source_blocks: Mapping[str, Sequence[int]],
    destination: PoolGeometry,
    destination_blocks: Mapping[str, Sequence[int]],
    num_tokens: int,
    local_tokens: int,
) -> dict[str, Correspondence]:
    """By group, which source block goes where. Raises `PlanError`, see `plan_read`."""
    require_alike(source, destination)
    names = {group.name for group in destination.groups}
    if set(source_blocks) != names or set(destination_blocks) != names:
        raise PlanError(
            f"blocks must be given for the groups {sorted(names)}; the source has {sorted(source_blocks)}, "
            f"the destination {sorted(destination_blocks)}"
        )
    return {
        group.name: Correspondence(
            source,
            source_blocks[group.name],
            destination,
            destination_blocks[group.name],
            group.name,
            num_tokens,
            local_tokens,
        )
        for group in destination.groups
    }


def pieces_of(source: GroupPages, destination: GroupPages, chunks: Chunks, layers: Sequence[int]) -> list[_Piece]:
    """The runs of some chunks in some layers, given by their place in the group. Layers that share their pages with an
    earlier one move once."""
    alike: dict[tuple[int, ...], dict[tuple[int, int], None]] = {}
    for index in layers:
        there, here = source.layers[index], destination.layers[index]
        key = (there.region, here.region, *_strides(there), *_strides(here))
        alike.setdefault(key, {})[there.offset, here.offset] = None
    return [
        _expand(destination.num_heads, destination.content_bytes, chunks, key, np.array(list(offsets), dtype=np.int64))
        for key, offsets in alike.items()
    ]


def _strides(page: LayerPages) -> tuple[int, int, int]:
    return page.block_stride, page.head_stride, page.token_stride


def _expand(num_heads: int, content: int, chunks: Chunks, key: tuple[int, ...], layers: Offsets) -> _Piece:
    source_region, destination_region, *strides = key
    (s_block, s_head, s_token), (d_block, d_head, d_token) = strides[:3], strides[3:]
    order = np.argsort(chunks.destination_block * d_block + chunks.destination_row * d_token, kind="stable")
    source = (chunks.source_block * s_block + chunks.source_row * s_token)[order]
    destination = (chunks.destination_block * d_block + chunks.destination_row * d_token)[order]

    run, left = content, [(chunks.tokens, s_token, d_token), (num_heads, s_head, d_head)]
    while folding := [dim for dim in left if dim[0] == 1 or dim[1] == dim[2] == run]:
        left.remove(folding[0])
        run *= folding[0][0]
    by_layer = layers[np.argsort(layers[:, 1], kind="stable")]
    if np.all(np.diff(by_layer, axis=0) == run):
        run *= len(by_layer)
        by_layer = by_layer[:1]
    source, destination, length = join(source, destination, np.full(len(source), run, dtype=np.int64))

    dims = [(d_block, source, destination)]
    dims += [(d, np.arange(n, dtype=np.int64) * s, np.arange(n, dtype=np.int64) * d) for n, s, d in left]
    step = int(by_layer[1, 1] - by_layer[0, 1]) if len(by_layer) > 1 else 0
    dims.append((step, np.ascontiguousarray(by_layer[:, 0]), np.ascontiguousarray(by_layer[:, 1])))
    dims.sort(key=lambda dim: -dim[0])
    by_block = [len(length) if offsets is source else 1 for _, offsets, _ in dims]
    shape = [len(offsets) for _, offsets, _ in dims]
    return _Piece(
        source_region,
        destination_region,
        _sums([dim[1] for dim in dims]),
        _sums([dim[2] for dim in dims]),
        np.broadcast_to(length.reshape(by_block), shape).ravel(),
    )


def _sums(each: list[Offsets]) -> Offsets:
    """Every sum of one element of each, in the order of the lists."""
    total = each[0]
    for more in each[1:]:
        total = (total[:, None] + more).ravel()
    return total


def join(source: Offsets, destination: Offsets, length: Offsets) -> tuple[Offsets, Offsets, Offsets]:
    """Make one run of neighbours that are adjacent on both sides."""
    joins = (source[:-1] + length[:-1] == source[1:]) & (destination[:-1] + length[:-1] == destination[1:])
    if not len(length) or not np.any(joins):
        return source, destination, length
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    return source[starts], destination[starts], np.add.reduceat(length, starts)


def merged(pieces: list[_Piece], op: Op) -> tuple[PlannedBatch, ...]:
    """One batch for each pair of regions, sorted by destination.

    Raises:
        PlanError: destination runs overlap: the geometry, or the block ids of groups that share pages, are wrong.
    """
    batches = []
    for there, here in sorted({(piece.source_region, piece.destination_region) for piece in pieces}):
        mine = [p for p in pieces if (p.source_region, p.destination_region) == (there, here)]
        source, destination, length = _sorted_runs(mine)
        if op == "read":
            runs = Runs(local=destination, remote=source, length=length)
            batches.append(PlannedBatch(local_region=here, remote_region=there, runs=runs))
        else:
            runs = Runs(local=source, remote=destination, length=length)
            batches.append(PlannedBatch(local_region=there, remote_region=here, runs=runs))
    return tuple(batches)


def _sorted_runs(pieces: list[_Piece]) -> tuple[Offsets, Offsets, Offsets]:
    if len(pieces) == 1:
        source, destination, length = pieces[0].source, pieces[0].destination, pieces[0].length
    else:
        source = np.concatenate([piece.source for piece in pieces])
        destination = np.concatenate([piece.destination for piece in pieces])
        length = np.concatenate([piece.length for piece in pieces])
    if _overlap(destination, length):  # or are not sorted
        order = np.argsort(destination, kind="stable")
        source, destination, length = source[order], destination[order], length[order]
        if _overlap(destination, length):
            raise PlanError("pages of different layers or groups overlap in the destination; its geometry is wrong")
    return join(source, destination, length)


def _overlap(start: Offsets, length: Offsets) -> bool:
    return bool(np.any(start[1:] - start[:-1] < length[:-1]))
