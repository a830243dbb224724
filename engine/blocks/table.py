"""The blocks of one sequence, group by group."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

NO_BLOCK = -1
"""In a table, for tokens that the group has dropped, or never needed here."""


class BlockTable(msgspec.Struct, eq=False):
    """The blocks that hold a sequence's tokens, in their order, for each group of the pool by name.

    In an attention group entry `i` holds tokens `i * block_size` and on; entries of tokens that no later query sees are
    `NO_BLOCK`. In a state group entry 0, the running-state column, is the slot that the next step reads and writes.
    Only its owner frees a table, through the pool. `published` counts the leading blocks that are in the prefix cache.
    `scratch` are slots, by state group, to put a state aside in while drafts are verified; they never leave the engine.
    """

    owner: str
    groups: dict[str, list[int]] = msgspec.field(default_factory=dict)
    freed: bool = False
    lent: bool = False
    published: int = 0
    scratch: dict[str, int] = msgspec.field(default_factory=dict)
    _arrays: dict[str, npt.NDArray[np.int32]] = msgspec.field(default_factory=dict)
    _filled: dict[str, int] = msgspec.field(default_factory=dict)

    def array(self, group: str, count: int) -> npt.NDArray[np.int32]:
        """The ids as an array, of which the first `count` entries are good, except for those that have been dropped
        since. Kept from call to call, so that a step does not pay for the length of its sequences."""
        ids, filled = self.groups[group], self._filled.get(group, 0)
        array = self._arrays.get(group)
        if array is None or len(array) < count:
            array = np.resize(array, max(count, 2 * filled)) if array is not None else np.empty(count, dtype=np.int32)
            self._arrays[group] = array
        if filled < count:
            array[filled:count] = ids[filled:count]
            self._filled[group] = count
        return array

    @property
    def block_ids(self) -> list[int]:
        """The ids, of a pool that has one group."""
        if not self.groups:
            return []
        (ids,) = self.groups.values()
        return ids

    def by_group(self) -> dict[str, list[int]]:
        """The blocks there are, as they are handed over: lists that end with the block of the last token."""
        return {name: [block for block in ids if block != NO_BLOCK] for name, ids in self.groups.items()}
