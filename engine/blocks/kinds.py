"""What each kind of group keeps of a sequence, and from where on it can be resumed.

A rule answers two questions. Which is the first token that a query at some position still sees: blocks before it can be
dropped. And how many leading blocks of a prompt the cache can stand in for: a full group needs all of them, a windowed
one only those that the next query sees, a state group the state at exactly that border.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from connector.pages import Group, GroupSpec
from engine.blocks.index import PrefixIndex


class Kind(Protocol):
    """See the module."""

    drops: ClassVar[bool]
    """Whether tokens are dropped that no later query sees."""

    def first_visible(self, position: int) -> int:
        """The first token that a query at `position` sees."""

    def longest(self, num_blocks: int, hashes: Sequence[bytes], index: PrefixIndex, block_size: int) -> int:
        """The most leading blocks, at most `num_blocks`, that the group can be resumed after."""

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """The blocks that a sequence of `num_tokens` holds at most, computed by `step_tokens` at a time."""


class WholeContext(msgspec.Struct, frozen=True):
    """Full attention and latents: every token stays."""

    drops: ClassVar[bool] = False

    def first_visible(self, position: int) -> int:
        """See `Kind`."""
        return 0

    def longest(self, num_blocks: int, hashes: Sequence[bytes], index: PrefixIndex, block_size: int) -> int:
        """See `Kind`."""
        for block in range(num_blocks):
            if index.find(hashes[block]) is None:
                return block
        return num_blocks

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """See `Kind`."""
        return -(-num_tokens // block_size)


class _Dropping(msgspec.Struct, frozen=True):
    """Groups that drop tokens: `tokens` is the window, or the length of a chunk."""

    tokens: int
    drops: ClassVar[bool] = True

    def first_visible(self, position: int) -> int:
        """See `Kind`."""
        raise NotImplementedError

    def longest(self, num_blocks: int, hashes: Sequence[bytes], index: PrefixIndex, block_size: int) -> int:
        """See `Kind`."""
        end = num_blocks
        while end:
            needed = range(self.first_visible(end * block_size) // block_size, end)
            missing = next((block for block in reversed(needed) if index.find(hashes[block]) is None), None)
            if missing is None:
                return end
            end = missing
        return 0

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """See `Kind`."""
        # The window of a step's first query, the step itself, and one more where both ends lie within a block.
        return min(-(-num_tokens // block_size), -(-(self.tokens - 1 + step_tokens) // block_size) + 1)


class Window(_Dropping, frozen=True):
    """A query sees the last `tokens` tokens, its own included."""

    def first_visible(self, position: int) -> int:
        """See `Kind`."""
        return max(0, position - self.tokens + 1)


class Chunked(_Dropping, frozen=True):
    """A query sees what lies in its own chunk of `tokens` tokens."""

    def first_visible(self, position: int) -> int:
        """See `Kind`."""
        return position // self.tokens * self.tokens


class StateSlots(msgspec.Struct, frozen=True):
    """A recurrent state: one slot per sequence. With `aligned`, states at borders of blocks are kept for others."""

    aligned: bool
    drops: ClassVar[bool] = False

    def first_visible(self, position: int) -> int:
        """See `Kind`."""
        return 0

    def longest(self, num_blocks: int, hashes: Sequence[bytes], index: PrefixIndex, block_size: int) -> int:
        """See `Kind`."""
        if not self.aligned:
            return 0
        return next((n for n in range(num_blocks, 0, -1) if index.find(hashes[n - 1]) is not None), 0)

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """See `Kind`."""
        return 1


def kind_of(spec: Group, *, window: int = 0, aligned: bool = False) -> Kind:
    """The rule for a group; `window` is in tokens, of the kinds that have one."""
    if not isinstance(spec, GroupSpec):
        return StateSlots(aligned)
    if spec.kind == "window":
        return Window(window)
    if spec.kind == "chunked":
        return Chunked(window)
    return WholeContext()
