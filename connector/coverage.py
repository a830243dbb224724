"""Which blocks a transfer writes completely, proved by the bytes that it writes and not by the name of a layout.

Whoever zeroes blocks before they are used may leave out these, and only these: a byte that nobody writes has to be
zeroed (kv-pages: zeroing).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from connector.pages import GroupPages, PoolGeometry, block_runs
from connector.transport.base import Offsets


def covered_blocks(
    geometry: PoolGeometry, group: GroupPages, block_ids: Iterable[int], offsets: Offsets, lengths: Offsets
) -> frozenset[int]:
    """Those of `block_ids` every byte of which, in every layer of the group, lies in one of the ranges written:
    `lengths` bytes from `offsets` of the pool's region on. Ranges may touch and overlap."""
    blocks = np.unique(np.fromiter(block_ids, dtype=np.int64))
    if not len(blocks) or not len(offsets):
        return frozenset()
    starts, ends = _union(np.asarray(offsets, dtype=np.int64), np.asarray(lengths, dtype=np.int64))
    covered = np.ones(len(blocks), dtype=bool)
    for run in block_runs(geometry, group):
        begin = run.offset + blocks * run.block_stride
        place = np.searchsorted(starts, begin, side="right") - 1
        covered &= (place >= 0) & (begin + run.num_bytes <= ends[np.maximum(place, 0)])
    return frozenset(blocks[covered].tolist())


def _union(offsets: Offsets, lengths: Offsets) -> tuple[Offsets, Offsets]:
    """The ranges, merged where they touch, in ascending order."""
    order = np.argsort(offsets, kind="stable")
    starts = offsets[order]
    reached = np.maximum.accumulate(starts + lengths[order])
    begins = np.flatnonzero(np.concatenate([[True], starts[1:] > reached[:-1]]))
    return starts[begins], reached[np.concatenate([begins[1:] - 1, [len(starts) - 1]])]
