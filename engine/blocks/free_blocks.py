"""The blocks that nobody holds, and in which order they are taken.

Blocks with nothing worth keeping go first: the most recently freed, then those never used, lowest first, so that
neighbours merge into longer runs when they are transferred. Last come those whose content may be asked for again, the
longest unused first. Every operation takes constant time, whatever the size of the pool.
"""

from __future__ import annotations

from collections import OrderedDict


class FreeBlocks:
    """See the module."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._never_used = 0  # the lowest block that was never taken
        self._plain: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first

    def __len__(self) -> int:
        return self._num_blocks - self._never_used + len(self._plain) + len(self._cached)

    def __contains__(self, block: int) -> bool:
        return self._never_used <= block < self._num_blocks or block in self._cached or block in self._plain

    @property
    def num_cached(self) -> int:
        """Those whose content may be asked for again."""
        return len(self._cached)

    def take(self) -> tuple[int, bool]:
        """A block, and whether it had content worth keeping, which is lost now."""
        if self._plain:
            return self._plain.pop(), False
        if self._never_used < self._num_blocks:
            self._never_used += 1
            return self._never_used - 1, False
        block, _ = self._cached.popitem(last=False)
        return block, True

    def take_cached(self, block: int) -> None:
        """Take this one, which has content that was asked for."""
        del self._cached[block]

    def put(self, block: int, *, cached: bool) -> None:
        """Give a block back."""
        if cached:
            self._cached[block] = None
        else:
            self._plain.append(block)
