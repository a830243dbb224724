"""Pools of every layout with recognisable bytes, and a copy that follows a plan."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from connector import GroupPages, GroupSpec, PoolGeometry, StateSpec, build_geometry
from connector.plan import PlannedBatch
from connector.transport.base import Op
from tests.connector.fabric import Bytes

FULL = GroupSpec(name="full", layers=(0, 2, 3), num_kv_heads=2, key_dim=3, value_dim=3, itemsize=2)
WINDOW = GroupSpec(name="window", layers=(1,), num_kv_heads=1, key_dim=4, value_dim=4, itemsize=2, kind="window")
LATENT = GroupSpec(name="latent", layers=(4, 5), num_kv_heads=1, key_dim=9, value_dim=0, itemsize=2, kind="latent")
STATE = StateSpec(name="state", layers=(6, 7), conv_bytes=10, ssm_bytes=24, conv_dtype="bfloat16", ssm_dtype="float32")
EVERY = (FULL, WINDOW, LATENT, STATE)
COUNTS = {"full": 12, "window": 9, "latent": 12, "state": 3}


def every_group(layout: str, block_size: int) -> PoolGeometry:
    """A pool of a full, a windowed, a latent and a recurrent group."""
    return build_geometry(EVERY, layout=layout, block_size=block_size, num_blocks=COUNTS)


def memory(geometry: PoolGeometry, seed: int) -> list[Bytes]:
    """One array for each region, with bytes that depend on the seed."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length, dtype=np.uint8) for length in geometry.region_bytes]


def cells(geometry: PoolGeometry, regions: list[Bytes], group: GroupPages, layer: int, block: int) -> Bytes:
    """The page of one block in one layer as [heads, tokens, content bytes], wherever its bytes lie."""
    page = next(page for page in group.layers if page.layer == layer)
    tokens = geometry.tokens_per_block(group)
    return np.lib.stride_tricks.as_strided(
        regions[page.region][page.offset + block * page.block_stride :],
        (group.num_heads, tokens, group.content_bytes),
        (page.head_stride, page.token_stride, 1),
    )


def carry_out(batches: Iterable[PlannedBatch], op: Op, local: list[Bytes], remote: list[Bytes]) -> None:
    """Move the bytes as a transport would."""
    for batch in batches:
        here, there = local[batch.local_region], remote[batch.remote_region]
        for at, to, length in zip(batch.runs.local, batch.runs.remote, batch.runs.length, strict=True):
            if op == "read":
                here[at : at + length] = there[to : to + length]
            else:
                there[to : to + length] = here[at : at + length]
