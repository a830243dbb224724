"""A pool of bytes, and which of them belong to a block, cell by cell."""

from __future__ import annotations

import torch

from connector.pages import GroupSpec, PoolGeometry, StateSpec, build_geometry

GROUPS = (
    GroupSpec(name="full", layers=(0, 2), num_kv_heads=2, key_dim=3, value_dim=1, itemsize=2),
    GroupSpec(name="w", layers=(1,), num_kv_heads=1, key_dim=2, value_dim=2, itemsize=4, kind="window"),
    StateSpec(name="s", layers=(3, 4), conv_bytes=10, ssm_bytes=20, conv_dtype="float32", ssm_dtype="float32"),
)
NUM_BLOCKS = {"full": 5, "w": 4, "s": 3}


def geometry_of(layout: str) -> PoolGeometry:
    """Two groups of attention and one of states."""
    return build_geometry(GROUPS, layout=layout, block_size=3, num_blocks=NUM_BLOCKS)


def filled(geometry: PoolGeometry, value: int = 7) -> torch.Tensor:
    """The whole pool as bytes."""
    return torch.full((geometry.region_bytes[0],), value, dtype=torch.uint8)


def bytes_of(geometry: PoolGeometry, name: str, block: int) -> torch.Tensor:
    """The places of a block's bytes, layer by layer and cell by cell."""
    group = geometry.group(name)
    return torch.cat(
        [
            torch.arange(group.content_bytes)
            + (layer.offset + block * layer.block_stride + head * layer.head_stride + token * layer.token_stride)
            for layer in group.layers
            for head in range(group.num_heads)
            for token in range(geometry.tokens_per_block(group))
        ]
    )
