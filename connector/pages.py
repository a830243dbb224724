"""How KV pages lie in a pool: the one vocabulary that the engine and the connector share.

A *block* is a scheduler's block id and holds `block_size` tokens of every layer of one *group*. A *page* is the bytes
of one block in one layer. A recurrent group's block is a *state slot*: one page per layer that holds a sequence's conv
and SSM state. A block id means nothing without its group.

Layout letters, outermost first: L layer, B block, H KV head, N token in the block, C content (K and V of one head,
packed: the key's dimensions, then the value's; a latent cache has one head). In every layout a page is a box of heads
by tokens, each cell of which is `content_bytes` long, so that one rule describes them all: cell (block, head, token) of
a layer starts at `offset + block * block_stride + head * head_stride + token * token_stride` of its region. A layer is
never described by its length alone: where the block is outermost the stride is the sum over the layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")
"""Physical orders that can be built. In the first four a page is one run; in BLNHC, BLHNC and BHLNC a block of all
layers is one; heads are contiguous within a page in LBHNC and BLHNC."""

GROUP_ALIGNMENT = 4096
"""Bytes; each group of a pool starts at a multiple of it, in every region."""

STATE_ALIGNMENT = 16
"""Bytes; the SSM state starts at a multiple of it within its slot, and so does the next slot."""

Kind: TypeAlias = Literal["full", "window", "chunked", "latent", "state"]


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """One KV cache group of attention layers: those whose blocks are allocated together.

    Shapes are per rank. `itemsize` is the bytes of one cache element. Only `full` and `latent` groups keep every token;
    the others may have dropped the oldest blocks. A latent group has one head and no value.
    """

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    kind: Literal["full", "window", "chunked", "latent"] = "full"

    @property
    def content_bytes(self) -> int:
        """Bytes of one token in one head."""
        return (self.key_dim + self.value_dim) * self.itemsize

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer."""
        return self.num_kv_heads * block_size * self.content_bytes


class StateSpec(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """One group of recurrent layers, whose blocks are state slots. Sizes are per slot, layer and rank, in bytes.

    The conv state comes first, in its dtype; the SSM (or delta) state after it, in its own. Either may be empty.
    """

    name: str
    layers: tuple[int, ...]
    conv_bytes: int
    ssm_bytes: int
    conv_dtype: str
    ssm_dtype: str
    kind: Literal["state"] = "state"

    @property
    def ssm_offset(self) -> int:
        """Where the SSM state starts in a slot page."""
        return _aligned(self.conv_bytes, STATE_ALIGNMENT)

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one slot in one layer, whatever the block size."""
        return _aligned(self.ssm_offset + self.ssm_bytes, STATE_ALIGNMENT)


Group: TypeAlias = GroupSpec | StateSpec


class LayerPages(msgspec.Struct, frozen=True, kw_only=True):
    """Where the pages of one layer lie; strides in bytes, see the module. Of a state, heads and tokens are one."""

    layer: int
    region: int
    offset: int
    page_bytes: int
    block_stride: int
    num_blocks: int
    head_stride: int
    token_stride: int


class GroupPages(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of one group, in the order of its layers.

    `parts` names what a slot page of a state group is made of: (name, offset, bytes).
    """

    name: str
    kind: Kind
    num_blocks: int
    num_heads: int
    content_bytes: int
    layers: tuple[LayerPages, ...]
    parts: tuple[tuple[str, int, int], ...] = ()


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

    def tokens_per_block(self, group: GroupPages) -> int:
        """Rows of a page: a state slot has one, whatever it stands for."""
        return 1 if group.kind == "state" else self.block_size

    def extent(self, group: GroupPages, page: LayerPages) -> int:
        """Bytes from the first to the last byte of a layer's pages: what of its region they need."""
        return (
            (page.num_blocks - 1) * page.block_stride
            + (group.num_heads - 1) * page.head_stride
            + (self.tokens_per_block(group) - 1) * page.token_stride
            + group.content_bytes
        )


def block_bytes(group: Group, block_size: int) -> int:
    """Bytes of one block over all layers of its group."""
    return len(group.layers) * group.page_bytes(block_size)


def build_geometry(
    groups: Sequence[Group], *, layout: str, block_size: int, num_blocks: Mapping[str, int]
) -> PoolGeometry:
    """Lay out `num_blocks` blocks of each group, one group after the other, in one region.

    Raises:
        ValueError: for a layout that is not in `LAYOUTS`, a size that is not positive, or a group without a count.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"page layout {layout!r} is not supported; choose one of {', '.join(LAYOUTS)}")
    missing = [group.name for group in groups if num_blocks.get(group.name, 0) < 1]
    if block_size < 1 or missing or not groups:
        raise ValueError(
            f"a pool needs at least one block of one token for each group, got {dict(num_blocks)} blocks "
            f"of {block_size} tokens for the groups {[group.name for group in groups]}"
        )
    end = 0
    laid_out = []
    for group in groups:
        start = _aligned(end, GROUP_ALIGNMENT)
        laid_out.append(_lay_out(group, layout, block_size, num_blocks[group.name], start))
        end = start + num_blocks[group.name] * block_bytes(group, block_size)
    return PoolGeometry(layout=layout, block_size=block_size, region_bytes=(end,), groups=tuple(laid_out))


class BlockRun(msgspec.Struct, frozen=True):
    """`num_bytes` adjacent bytes of every block of a group: those of block b start at `offset + b * block_stride`."""

    offset: int
    block_stride: int
    num_bytes: int


def block_runs(geometry: PoolGeometry, group: GroupPages) -> list[BlockRun]:
    """The bytes of a block, all layers of its group, as the fewest runs; for groups that lie in one region. Of layers
    at the same address the widest page counts."""
    widest: dict[tuple[int, int], int] = {}
    for layer in group.layers:
        for offset, num_bytes in _page_runs(geometry, group, layer):
            key = layer.block_stride, offset
            widest[key] = max(widest.get(key, 0), num_bytes)
    runs: list[BlockRun] = []
    for (stride, offset), num_bytes in sorted(widest.items()):
        last = runs[-1] if runs else None
        if last is not None and last.block_stride == stride and last.offset + last.num_bytes >= offset:
            end = max(last.offset + last.num_bytes, offset + num_bytes)
            runs[-1] = BlockRun(last.offset, stride, end - last.offset)
        else:
            runs.append(BlockRun(offset, stride, num_bytes))
    return runs


def _page_runs(geometry: PoolGeometry, group: GroupPages, layer: LayerPages) -> list[tuple[int, int]]:
    """(offset, bytes) of a page in block 0: its cells, merged where they touch."""
    run = group.content_bytes
    apart: list[range] = []
    for stride, count in sorted(
        [(layer.token_stride, geometry.tokens_per_block(group)), (layer.head_stride, group.num_heads)]
    ):
        if stride == run and not apart:
            run *= count
        else:
            apart.append(range(0, stride * count, stride))
    return [(layer.offset + sum(steps), run) for steps in itertools.product(*apart)]


def _lay_out(group: Group, layout: str, block_size: int, num_blocks: int, start: int) -> GroupPages:
    page_bytes = group.page_bytes(block_size)
    if isinstance(group, StateSpec):
        heads, tokens, content = 1, 1, page_bytes
        parts: tuple[tuple[str, int, int], ...] = (
            ("conv", 0, group.conv_bytes),
            ("ssm", group.ssm_offset, group.ssm_bytes),
        )
    else:
        heads, tokens, content = group.num_kv_heads, block_size, group.content_bytes
        parts = ()
    strides, stride = {}, content
    for letter in reversed(layout[:-1]):
        strides[letter] = stride
        stride *= {"L": len(group.layers), "B": num_blocks, "H": heads, "N": tokens}[letter]
    layers = tuple(
        LayerPages(
            layer=layer,
            region=0,
            offset=start + index * strides["L"],
            page_bytes=page_bytes,
            block_stride=strides["B"],
            num_blocks=num_blocks,
            head_stride=strides["H"],
            token_stride=strides["N"],
        )
        for index, layer in enumerate(group.layers)
    )
    return GroupPages(
        name=group.name,
        kind=group.kind,
        num_blocks=num_blocks,
        num_heads=heads,
        content_bytes=content,
        layers=layers,
        parts=parts,
    )


def _aligned(length: int, to: int) -> int:
    return -(-length // to) * to
