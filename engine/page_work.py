"""What has to be done to pages before a step's forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from engine.loads import Load


class BlockCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of one block of a group, in all its layers, are copied to another."""

    group: str
    source: int
    destination: int


class PageWork(msgspec.Struct):
    """Of one step, in the order in which it is done; `None` and empty mean the same."""

    new_block_ids_to_zero: dict[str, list[int]] | None = None
    copies: list[BlockCopy] = msgspec.field(default_factory=list)
    loads: list[Load] = msgspec.field(default_factory=list)
