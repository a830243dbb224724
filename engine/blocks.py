"""Who owns which block of the pool.

Every block is free or belongs to exactly one `BlockTable`. The pool is shared by the engine's thread, which extends the
tables of running sequences, and by others, who reserve blocks for pages that come from elsewhere; a lock makes each of
its operations atomic. Blocks are handed out lowest-numbered first after a start and most recently freed first later;
neighbours merge into longer runs when they are transferred.

A table whose blocks are being sent elsewhere is lent: it may be freed, and its blocks come back when the loan has been
returned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from engine.errors import BlockError

logger = logging.getLogger(__name__)


class BlockTable(msgspec.Struct, eq=False):
    """The blocks that hold a sequence's tokens, in their order. Only its owner frees it, through the pool."""

    owner: str
    block_ids: list[int]
    freed: bool = False
    lent: bool = False


class BlockPool:
    """See the module."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners: dict[int, BlockTable] = {}
        self._lock = threading.Lock()
        self.frees = 0
        """How many times blocks have come back."""
        self._listeners: list[Callable[[], None]] = []

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def on_freed(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, on whatever thread, each time blocks have come back."""
        self._listeners.append(listener)

    def allocate(self, owner: str, num_tokens: int) -> BlockTable | None:
        """A table that can hold `num_tokens` tokens, or None when there are not enough free blocks."""
        table = BlockTable(owner, [])
        return table if self.extend(table, num_tokens) else None

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Let `table` hold `num_tokens` tokens. All or nothing: False when there are not enough free blocks.

        Raises:
            BlockError: the table has been freed.
        """
        with self._lock:
            if table.freed:
                raise BlockError(f"{table.owner} extends a block table that it has freed")
            missing = self.blocks_for(num_tokens) - len(table.block_ids)
            if missing > len(self._free):
                return False
            for _ in range(missing):
                block = self._free.pop()
                self._owners[block] = table
                table.block_ids.append(block)
            return True

    def free(self, table: BlockTable) -> None:
        """Give every block of the table back. Freeing a table twice is harmless.

        Raises:
            BlockError: a block of it belongs to somebody else; nothing is freed.
        """
        with self._lock:
            if table.freed:
                return
            for block in table.block_ids:
                owner = self._owners.get(block)
                if owner is not table:
                    raise BlockError(
                        f"{table.owner} frees block {block}, which belongs to {owner.owner if owner else 'nobody'}"
                    )
            table.freed = True
            if table.lent:
                return
            self._give_back(table)
        self.tell_listeners()

    def lend(self, table: BlockTable) -> None:
        """Somebody reads the blocks of a table that its owner may free at any time: they stay until `returned`.

        Raises:
            BlockError: the table has been freed, or is lent already.
        """
        with self._lock:
            if table.freed or table.lent:
                raise BlockError(f"the blocks of {table.owner} are {'free' if table.freed else 'lent'}, not to be lent")
            table.lent = True

    def returned(self, table: BlockTable) -> None:
        """Nobody reads the blocks any more. Harmless for a table that is not lent."""
        with self._lock:
            if not table.lent:
                return
            table.lent = False
            if not table.freed:
                return
            self._give_back(table)
        self.tell_listeners()

    def _give_back(self, table: BlockTable) -> None:
        self.frees += 1
        for block in reversed(table.block_ids):
            del self._owners[block]
            self._free.append(block)

    def tell_listeners(self) -> None:
        """Call everyone that `on_freed` was given. One that raises harms nobody else."""
        for listener in self._listeners:
            try:
                listener()
            except Exception:
                logger.exception("a listener to freed blocks failed")

    def validate(self) -> None:
        """Check that every block is free or has one owner, and that owners agree. For tests.

        Raises:
            BlockError: naming the first block that is not.
        """
        with self._lock:
            free = set(self._free)
            if len(free) != len(self._free):
                raise BlockError("a block is in the free list twice")
            for block in range(self.num_blocks):
                table = self._owners.get(block)
                if (table is None) != (block in free):
                    raise BlockError(f"block {block} is {'free and owned' if table else 'neither free nor owned'}")
                if table is not None and table.block_ids.count(block) != 1:
                    raise BlockError(f"block {block} is not once in the table of its owner {table.owner}")
