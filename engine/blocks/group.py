"""The blocks of one group: how many hold each, what lies in them, and which have to be zeroed before they are read."""

from __future__ import annotations

from engine.blocks.free_blocks import FreeBlocks
from engine.blocks.index import Content, PrefixIndex
from engine.blocks.kinds import Kind, StateSlots
from engine.errors import BlockError


class BlockGroup:
    """See the module. Not locked: the pool that it is part of is.

    With `zeroing`, newly taken blocks of attention are recorded until `take_unzeroed`.
    """

    def __init__(self, name: str, kind: Kind, num_blocks: int, *, zeroing: bool = False) -> None:
        self.name = name
        self.kind = kind
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self.free = FreeBlocks(num_blocks)
        self.holders: dict[int, int] = {}
        """How many hold each block that is not free."""
        self.records = zeroing and not isinstance(kind, StateSlots)
        self._unzeroed: dict[int, None] = {}

    @property
    def is_state(self) -> bool:
        """Whether its blocks are state slots."""
        return isinstance(self.kind, StateSlots)

    def take(self, *, record: bool = True) -> int:
        """A block for one holder; what lay in it is forgotten. `record` when it has to be zeroed before it is read."""
        block, cached = self.free.take()
        if cached:
            self.index.remove(block)
        self.holders[block] = 1
        if record and self.records:
            self._unzeroed[block] = None
        return block

    def share(self, block: int) -> int:
        """One more holder of a block whose content is known."""
        holders = self.holders.get(block, 0)
        if holders == 0:
            self.free.take_cached(block)
        self.holders[block] = holders + 1
        return block

    def drop(self, block: int) -> None:
        """One holder less.

        Raises:
            BlockError: nobody holds it.
        """
        holders = self.holders.get(block, 0)
        if holders == 0:
            raise BlockError(f"block {block} of group {self.name!r} is dropped, but nobody holds it")
        if holders > 1:
            self.holders[block] = holders - 1
            return
        del self.holders[block]
        self._unzeroed.pop(block, None)
        self.free.put(block, cached=block in self.index)

    def publish(self, block: int, content: Content) -> bool:
        """Others may use what lies in it from now on. False when they can already."""
        return self.index.add(block, content)

    def record(self, block: int) -> None:
        """A block that somebody holds has to be zeroed (again) before it is read: a load into it has failed."""
        if self.records and block in self.holders:
            self._unzeroed[block] = None

    def take_unzeroed(self) -> list[int]:
        """The recorded blocks, in the order they were taken; each is given out once."""
        blocks = list(self._unzeroed)
        self._unzeroed.clear()
        return blocks
