"""A small page pool with real memory, whose blocks carry recognisable bytes."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from connector import CompatibilityRecord, EngineId, GroupSpec, Memory, PoolGeometry, build_geometry
from connector.pages import block_bytes
from tests.connector.fabric import Bytes, Custody

BLOCK_SIZE = 4
FULL = GroupSpec(name="full", layers=(0, 1, 2), num_kv_heads=2, key_dim=4, value_dim=4, itemsize=2)
WIDE = GroupSpec(name="full", layers=tuple(range(8)), num_kv_heads=8, key_dim=64, value_dim=64, itemsize=2)
P = EngineId("prefill-0", 11)
D = EngineId("decode-0", 22)
TOKEN = b"the token of this cluster"


def compatibility(**changes: object) -> CompatibilityRecord:
    """The record of a worker; `changes` make it differ."""
    fields: dict[str, object] = {
        "model_fingerprint": "tiny-llama/1",
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "layout": "BLHNC",
        "block_size": BLOCK_SIZE,
        "groups": (FULL,),
    }
    return CompatibilityRecord(**{**fields, **changes})  # type: ignore[arg-type]


class Pool:
    """`num_blocks` blocks of one group. `custody` knows the blocks that an import may write."""

    def __init__(self, num_blocks: int = 16, group: GroupSpec = FULL) -> None:
        self.geometry: PoolGeometry = build_geometry(
            [group], layout="BLHNC", block_size=BLOCK_SIZE, num_blocks={group.name: num_blocks}
        )
        self.block_bytes = block_bytes(group, BLOCK_SIZE)
        length = self.geometry.region_bytes[0]
        self.fd = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, length)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.bytes: Bytes = np.frombuffer(mmap.mmap(self.fd, length), dtype=np.uint8)
        self.memory = Memory(address=self.bytes.ctypes.data, length=length, fd=self.fd)
        self.custody = Custody(self.bytes.nbytes)
        self.free = list(range(num_blocks))

    def __del__(self) -> None:
        os.close(self.fd)

    def block(self, block_id: int) -> Bytes:
        """The bytes of one block."""
        return self.bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def take(self, count: int) -> list[int]:
        """Allocate blocks that an import may write, those freed last first."""
        assert count <= len(self.free)
        taken = [self.free.pop() for _ in range(count)]
        for block_id in taken:
            self.custody.take(block_id * self.block_bytes, self.block_bytes)
        return taken

    def give_back(self, block_ids: list[int]) -> None:
        """Free blocks; from now on a write into them is a violation, and what they held is gone."""
        for block_id in block_ids:
            self.custody.give_back(block_id * self.block_bytes, self.block_bytes)
            self.block(block_id)[:] = 0xEE
        self.free += block_ids

    def fill(self, block_ids: list[int], seed: int) -> None:
        """Write bytes that `holds` recognises."""
        for at, block_id in enumerate(block_ids):
            self.block(block_id)[:] = _pattern(seed, at, self.block_bytes)

    def holds(self, block_ids: list[int], seed: int) -> bool:
        """Whether the blocks hold, in this order, what `fill` wrote with the same seed."""
        return all(
            np.array_equal(self.block(block_id), _pattern(seed, at, self.block_bytes))
            for at, block_id in enumerate(block_ids)
        )


def _pattern(seed: int, at: int, length: int) -> Bytes:
    return np.random.default_rng((seed, at)).integers(1, 200, length, dtype=np.uint8)
