"""How KV pages lie in a pool: the one vocabulary that the engine and the connector share.

A *block* is a scheduler's block id and holds `block_size` tokens of every layer of one *group*. A *page* is the bytes
of one block in one layer. Everything is described by (region, offset, page bytes, block stride, block count), never by
length alone: in the layouts with the block outermost the stride is the sum over the layers.

Layout letters, outermost first: B block, L layer, H KV head, N token in the block, C content (K and V of one head,
packed: the key's dimensions, then the value's).
"""

from __future__ import annotations

import msgspec

LAYOUTS = ("BLHNC",)
"""Layouts that can be built. One block of all layers is one contiguous run, and so is each page of it."""


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: the layers whose blocks are allocated together.

    Shapes are per rank. `itemsize` is the bytes of one cache element.
    """

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer."""
        return self.num_kv_heads * block_size * (self.key_dim + self.value_dim) * self.itemsize


class LayerPages(msgspec.Struct, frozen=True, kw_only=True):
    """Where the pages of one layer lie: page `b` starts at `offset + b * block_stride` of region `region`."""

    layer: int
    region: int
    offset: int
    page_bytes: int
    block_stride: int
    num_blocks: int


class GroupPages(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of one group, in the order of its layers."""

    name: str
    num_blocks: int
    layers: tuple[LayerPages, ...]


class PoolGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """A whole page pool: its regions' lengths in bytes, and where each group's pages lie in them."""

    layout: str
    block_size: int
    region_bytes: tuple[int, ...]
    groups: tuple[GroupPages, ...]

    def group(self, name: str) -> GroupPages:
        """The group called `name`; `KeyError` names the known ones."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no KV cache group {name!r}; this pool has {[g.name for g in self.groups]}")


def block_bytes(group: GroupSpec, block_size: int) -> int:
    """Bytes of one block over all layers of its group."""
    return len(group.layers) * group.page_bytes(block_size)


def build_geometry(group: GroupSpec, *, layout: str, block_size: int, num_blocks: int) -> PoolGeometry:
    """Lay out `num_blocks` blocks of one group in one region.

    Raises:
        ValueError: for a layout that is not in `LAYOUTS`, or a size that is not positive.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"page layout {layout!r} is not supported; choose one of {', '.join(LAYOUTS)}")
    if block_size < 1 or num_blocks < 1:
        raise ValueError(
            f"a pool needs at least one block of one token, got {num_blocks} blocks of {block_size} tokens"
        )
    page = group.page_bytes(block_size)
    stride = page * len(group.layers)
    layers = tuple(
        LayerPages(
            layer=layer, region=0, offset=index * page, page_bytes=page, block_stride=stride, num_blocks=num_blocks
        )
        for index, layer in enumerate(group.layers)
    )
    return PoolGeometry(
        layout=layout,
        block_size=block_size,
        region_bytes=(stride * num_blocks,),
        groups=(GroupPages(name=group.name, num_blocks=num_blocks, layers=layers),),
    )
