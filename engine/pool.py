"""The page pool: one memfd, mapped once, seen as one tensor per layer.

A memfd has no name to leak and is gone with its last mapping. It is sealed against shrinking, so that a peer that has
mapped it can never be hit by a vanished page.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from connector.pages import GroupSpec, PoolGeometry, block_bytes, build_geometry
from engine.errors import EngineError


class PagePool:
    """Pages of one group in layout BLHNC.

    `rows` is the whole pool as [blocks * layers * heads, tokens in a block * content]: one row is one head of one page,
    and the rows of a layer are found by adding `layer_row(layer)`. `layers[i]` is [blocks, heads, tokens, content].
    """

    def __init__(self, group: GroupSpec, *, layout: str, block_size: int, total_bytes: int, dtype: torch.dtype) -> None:
        num_blocks = total_bytes // block_bytes(group, block_size)
        if num_blocks < 1:
            raise EngineError(
                f"engine.kv_cache_bytes is {total_bytes}, but one block of {block_size} tokens takes "
                f"{block_bytes(group, block_size)} bytes; give the page pool more"
            )
        self.group = group
        self.geometry: PoolGeometry = build_geometry(
            [group], layout=layout, block_size=block_size, num_blocks={group.name: num_blocks}
        )
        self.num_blocks = num_blocks
        (self.length,) = self.geometry.region_bytes
        self.fd = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.length)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, self.length)
        except OSError as error:
            os.close(self.fd)
            raise EngineError(f"the page pool of {self.length} bytes cannot be mapped: {error}") from error
        content = group.key_dim + group.value_dim
        whole = torch.frombuffer(self._map, dtype=dtype).view(
            num_blocks, len(group.layers), group.num_kv_heads, block_size, content
        )
        self.address = whole.data_ptr()
        self.layers = [whole[:, index] for index in range(len(group.layers))]
        self.rows = whole.view(-1, block_size * content)

    def layer_row(self, layer: int) -> int:
        """The first row of a layer's page in block 0."""
        return layer * self.group.num_kv_heads

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last tensor that looks at it. Closing twice is harmless."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
