"""The page pool: one piece of memory for the pages of all groups and layers, seen as one tensor per layer.

On a CPU it is a memfd, mapped once. A memfd has no name to leak and is gone with its last mapping. It is sealed against
shrinking, so that a peer that has mapped it can never be hit by a vanished page.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence

import torch

from connector.pages import GroupPages, LayerPages, PoolGeometry, build_geometry
from engine.errors import EngineError
from engine.groups import CacheGroup


class PagePool:
    """Pages of every group. `num_blocks` are those of each, by name.

    `whole` is the memory as bytes. `pages[layer]` is the layer's attention cache as [blocks, heads, tokens, content],
    strided as the layout has it, `content` being a head's key, then its value.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        layout: str,
        block_size: int,
        num_blocks: Mapping[str, int],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.groups = list(groups)
        self.geometry: PoolGeometry = build_geometry(
            [group.spec for group in groups], layout=layout, block_size=block_size, num_blocks=num_blocks
        )
        (self.length,) = self.geometry.region_bytes
        self.fd = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.length)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, self.length)
        except OSError as error:
            os.close(self.fd)
            raise EngineError(f"the page pool of {self.length} bytes cannot be mapped: {error}") from error
        self.whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.whole.data_ptr()
        self.pages: dict[int, torch.Tensor] = {}
        for group in groups:
            if group.attention is None:
                continue
            laid_out = self.geometry.group(group.name)
            for layer in laid_out.layers:
                self.pages[layer.layer] = self._attention_view(laid_out, layer, dtypes[group.name])

    def _attention_view(self, group: GroupPages, layer: LayerPages, dtype: torch.dtype) -> torch.Tensor:
        item = dtype.itemsize
        strides = (layer.block_stride, layer.head_stride, layer.token_stride)
        assert layer.offset % item == 0
        assert not any(stride % item for stride in strides)
        return (
            self.whole[: self.length // item * item]
            .view(dtype)
            .as_strided(
                (layer.num_blocks, group.num_heads, self.geometry.block_size, group.content_bytes // item),
                (*(stride // item for stride in strides), 1),
                layer.offset // item,
            )
        )

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last tensor that looks at it. Closing twice is harmless."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
