"""Every block of a group as rows of bytes: whatever the layout, what is done to a block is done to these."""

from __future__ import annotations

import torch

from connector.pages import GroupPages, PoolGeometry, block_runs


def block_views(geometry: PoolGeometry, group: GroupPages, memory: torch.Tensor) -> list[torch.Tensor]:
    """[blocks, bytes] each, together all bytes of the group's blocks. `memory` is the whole pool as bytes."""
    num_blocks = group.num_blocks
    return [
        memory.as_strided((num_blocks, run.num_bytes), (run.block_stride, 1), run.offset)
        for run in block_runs(geometry, group)
    ]
