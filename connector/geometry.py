"""Is a pool's geometry possible, and do two pools' pages mean the same?

A peer's geometry is not to be trusted: everything that block arithmetic relies on is proved here once, before the
first plan is made of it. Pools may differ in size, place, layout and block size, never in what a token's bytes are.
"""

from __future__ import annotations

from connector.errors import PlanError
from connector.pages import LAYOUTS, GroupPages, LayerPages, PoolGeometry

MAX_REGION_BYTES = 1 << 56
"""Offsets are int64; far more than any pool, far less than an overflow."""


def check_geometry(geometry: PoolGeometry, whose: str) -> None:
    """Prove that every page of a pool lies inside its region, so that block arithmetic can be trusted.

    Raises:
        PlanError: with the first field that cannot be.
    """
    if geometry.layout not in LAYOUTS:
        raise PlanError(f"{whose} has the page layout {geometry.layout!r}; supported are {', '.join(LAYOUTS)}")
    if geometry.block_size < 1:
        raise PlanError(f"{whose} has blocks of {geometry.block_size} tokens")
    names = [group.name for group in geometry.groups]
    if not names or len(set(names)) != len(names):
        raise PlanError(f"{whose} must name each KV cache group once, it names {names}")
    if any(not 0 < length <= MAX_REGION_BYTES for length in geometry.region_bytes):
        raise PlanError(f"{whose} has regions of {geometry.region_bytes} bytes")
    for group in geometry.groups:
        if not group.layers:
            raise PlanError(f"{whose}: group {group.name!r} has no layers")
        if group.num_heads < 1 or group.content_bytes < 1:
            raise PlanError(
                f"{whose}: group {group.name!r} has {group.num_heads} heads of {group.content_bytes} bytes a token"
            )
        _check_parts(group, whose)
        for page in group.layers:
            _check_page(geometry, group, page, f"{whose}: group {group.name!r}, layer {page.layer}")


def _check_page(geometry: PoolGeometry, group: GroupPages, page: LayerPages, where: str) -> None:
    if page.num_blocks != group.num_blocks or page.num_blocks < 1:
        raise PlanError(f"{where} has {page.num_blocks} blocks, the group {group.num_blocks}")
    if not 0 <= page.region < len(geometry.region_bytes):
        raise PlanError(f"{where} is in region {page.region} of {len(geometry.region_bytes)}")
    tokens = geometry.tokens_per_block(group)
    if page.page_bytes != group.num_heads * tokens * group.content_bytes:
        raise PlanError(
            f"{where} has pages of {page.page_bytes} bytes, but {group.num_heads} heads x {tokens} tokens x "
            f"{group.content_bytes} bytes are {group.num_heads * tokens * group.content_bytes}"
        )
    strides = (page.block_stride, page.head_stride, page.token_stride)
    if page.offset < 0 or min(strides) < group.content_bytes:
        raise PlanError(
            f"{where} has offset {page.offset} and strides {strides} (block, head, token) for cells of "
            f"{group.content_bytes} bytes"
        )
    end = page.offset + geometry.extent(group, page)
    if end > geometry.region_bytes[page.region]:
        raise PlanError(f"{where} ends at byte {end} of {geometry.region_bytes[page.region]}")


def _check_parts(group: GroupPages, whose: str) -> None:
    end = 0
    for name, offset, length in group.parts:
        if offset < end or length < 0 or offset + length > group.content_bytes:
            raise PlanError(
                f"{whose}: {name} of group {group.name!r} takes bytes {offset} to {offset + length} of a slot of "
                f"{group.content_bytes}, after byte {end}"
            )
        end = offset + length


def require_alike(source: PoolGeometry, destination: PoolGeometry) -> None:
    """Prove that a page of one pool can become a page of the other.

    Raises:
        PlanError: with every field that differs, and both values.
    """
    differences = [
        f"{field}: source {theirs!r}, destination {ours!r}"
        for field, theirs, ours in _fields(source, destination)
        if theirs != ours
    ]
    if differences:
        raise PlanError(f"the two pools' pages differ ({'; '.join(differences)})")


def _fields(source: PoolGeometry, destination: PoolGeometry) -> list[tuple[str, object, object]]:
    names = [group.name for group in source.groups], [group.name for group in destination.groups]
    fields: list[tuple[str, object, object]] = [("groups", sorted(names[0]), sorted(names[1]))]
    for group in destination.groups:
        if group.name not in names[0]:
            continue
        other = source.group(group.name)
        fields += [
            (f"groups.{group.name}.kind", other.kind, group.kind),
            (f"groups.{group.name}.num_heads", other.num_heads, group.num_heads),
            (f"groups.{group.name}.content_bytes", other.content_bytes, group.content_bytes),
            (f"groups.{group.name}.layers", _layers(other), _layers(group)),
            (f"groups.{group.name}.parts", other.parts, group.parts),
        ]
    return fields


def _layers(group: GroupPages) -> list[int]:
    return [page.layer for page in group.layers]
