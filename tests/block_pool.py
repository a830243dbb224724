"""A pool of one group that keeps every token, as most tests want it."""

from __future__ import annotations

from engine.blocks import BlockGroup, BlockPool
from engine.blocks.kinds import WholeContext


def full_pool(num_blocks: int, block_size: int, *, prefix_cache: bool = False, zeroing: bool = False) -> BlockPool:
    """`num_blocks` blocks of the group `full`."""
    return BlockPool(
        [BlockGroup("full", WholeContext(), num_blocks, zeroing=zeroing)], block_size, prefix_cache=prefix_cache
    )
