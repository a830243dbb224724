"""Who owns which block of every group.

A block is free or held by one or more `BlockTable`s: a block whose content several sequences begin with is held by all
of them. Nobody writes into a block that more than one hold, or that the prefix cache knows; whoever wants to go on in
the middle of such a block gets a copy. The pool is shared by the engine's thread, which extends the tables of running
sequences, and by others, who reserve blocks for pages that come from elsewhere; a lock makes each of its operations
atomic, and each gives all the blocks that were asked for, of every group, or none.

A table whose blocks are being sent elsewhere is lent: it may be freed, and its blocks come back when the loan has been
returned. What a table holds is published, block by block, once it has been written: never in the step that writes it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from engine.blocks.chain import HashChain
from engine.blocks.group import BlockGroup
from engine.blocks.hits import find_hit
from engine.blocks.index import Content
from engine.blocks.table import NO_BLOCK, BlockTable
from engine.errors import BlockError
from engine.page_work import BlockCopy

logger = logging.getLogger(__name__)


class Admission(msgspec.Struct, frozen=True):
    """A table that holds the first `cached_tokens` tokens of a sequence already, once `copies` have been made.

    The copies' sources stay as they are until `BlockPool.copied`.
    """

    table: BlockTable
    cached_tokens: int
    copies: list[BlockCopy]


class BlockPool:
    """See the module. `block_size` is in tokens; without `prefix_cache` nothing is published."""

    def __init__(self, groups: Sequence[BlockGroup], block_size: int, *, prefix_cache: bool = True) -> None:
        self.groups = {group.name: group for group in groups}
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.num_blocks = sum(group.num_blocks for group in groups)
        self.frees = 0
        """How many times blocks have come back."""
        self._tables: dict[int, BlockTable] = {}
        self._pinned: Counter[tuple[str, int]] = Counter()  # sources of copies to be made
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, of all groups."""
        return sum(len(group.free) for group in self.groups.values())

    @property
    def num_cached(self) -> int:
        """Those of them whose content may be asked for again."""
        return sum(group.free.num_cached for group in self.groups.values())

    @property
    def has_states(self) -> bool:
        """Whether a group of it keeps recurrent states."""
        return any(group.is_state for group in self.groups.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take in a group that keeps all."""
        return -(-num_tokens // self.block_size)

    def on_freed(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, on whatever thread, each time blocks have come back."""
        self._listeners.append(listener)

    def allocate(
        self, owner: str, num_tokens: int, *, computed: int | None = None, record: bool = False
    ) -> BlockTable | None:
        """Blocks for the pages of the first `num_tokens` tokens of a sequence, which come from elsewhere; None when
        there are not enough. In groups that drop tokens they are those that the token after the first `computed` ones
        (all of them, if nothing is said) sees. They are not recorded
        for zeroing, unless asked for: whoever writes them meanwhile sees to what it does not write."""
        with self._lock:
            table = self._new_table(owner)
            if self._extend(table, num_tokens, num_tokens if computed is None else computed, num_tokens, record=record):
                return table
            self._forget(table)
            return None

    def admit(self, owner: str, tokens: Sequence[int], chain: HashChain, step_tokens: int) -> Admission | None:
        """A table for a sequence that is to be computed: what the prefix cache has of it, and blocks for all its
        `tokens`, or for those of its first step in groups that drop tokens. None when there are not enough."""
        with self._lock:
            table = self._new_table(owner)
            cached, copies = self._take_hit(table, tokens, chain)
            first_step = min(cached + step_tokens, len(tokens))
            if self._extend(table, first_step, cached, len(tokens)):
                return Admission(table, cached, self._place_copies(table, cached, copies))
            for copy in copies:
                self._unpin(copy.group, copy.source)
            self._forget(table)
            return None

    def extend(self, table: BlockTable, num_tokens: int, computed: int = 0) -> bool:
        """Let `table` hold `num_tokens` tokens, of which `computed` have been computed. All or nothing: False when
        there are not enough free blocks.

        Raises:
            BlockError: the table has been freed.
        """
        with self._lock:
            if table.freed:
                raise BlockError(f"{table.owner} extends a block table that it has freed")
            self._tables.setdefault(id(table), table)
            return self._extend(table, num_tokens, computed, num_tokens)

    def trim(self, table: BlockTable, computed: int) -> None:
        """Drop what no query at `computed` or later sees. A table that is lent keeps everything."""
        with self._lock:
            if table.lent or table.freed:
                return
            for name, ids in table.groups.items():
                group = self.groups[name]
                if group.is_state:
                    continue
                block = min(group.kind.first_visible(computed) // self.block_size, len(ids)) - 1
                while block >= 0 and ids[block] != NO_BLOCK:
                    group.drop(ids[block])
                    ids[block] = NO_BLOCK
                    block -= 1

    def publish(self, table: BlockTable, tokens: Sequence[int], computed: int, chain: HashChain) -> None:
        """The first `computed` of `tokens` lie in the table: others may use its full blocks from now on."""
        full = computed // self.block_size
        if not self.prefix_cache or full <= table.published:
            return
        hashes = chain.of(tokens, full)
        with self._lock:
            for block in range(table.published, full):
                start = block * self.block_size
                content = Content(chain.parent(block), tuple(tokens[start : start + self.block_size]), hashes[block])
                for name, ids in table.groups.items():
                    group = self.groups[name]
                    if not group.is_state and block < len(ids) and ids[block] != NO_BLOCK:
                        group.publish(ids[block], content)
            table.published = full

    def publish_tail(self, table: BlockTable, tokens: Sequence[int], computed: int, chain: HashChain) -> None:
        """Nothing more is written into the table: others may copy the beginning of its last block, too."""
        self.publish(table, tokens, computed, chain)
        full = computed // self.block_size
        rest = tuple(tokens[full * self.block_size : computed])
        if not self.prefix_cache or not rest or self.has_states:
            return
        with self._lock:
            chain.of(tokens, full)
            content = Content(chain.parent(full), rest, None)
            for name, ids in table.groups.items():
                if full < len(ids) and ids[full] != NO_BLOCK:
                    self.groups[name].publish(ids[full], content)

    def keep_states(self, table: BlockTable, digest: bytes) -> list[BlockCopy]:
        """Copies that keep the running states of a table for others, as they are after the prefix of this hash; nothing
        when they are known already, or no slot is free. Once they have been made, `kept` lets them be found."""
        copies: list[BlockCopy] = []
        with self._lock:
            for name, ids in table.groups.items():
                group = self.groups[name]
                if group.is_state and self.prefix_cache and group.index.find(digest) is None and len(group.free):
                    slot = group.take()
                    self._pinned[name, slot] += 1
                    copies.append(BlockCopy(group=name, source=ids[0], destination=slot))
        return copies

    def kept(self, copies: Sequence[BlockCopy], digest: bytes) -> None:
        """The copies of `keep_states` have been made."""
        with self._lock:
            for copy in copies:
                self.groups[copy.group].publish(copy.destination, Content(b"", (), digest))
                self._unpin(copy.group, copy.destination)

    def take_scratch(self, table: BlockTable) -> bool:
        """Let the table have a second slot in each state group. False when there are not enough."""
        with self._lock:
            for name, group in self.groups.items():
                if group.is_state and name not in table.scratch:
                    if not len(group.free):
                        return False
                    table.scratch[name] = group.take()
            return True

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        """The copies of an admission have been made, or will never be."""
        with self._lock:
            for copy in copies:
                self._unpin(copy.group, copy.source)

    def take_unzeroed(self) -> dict[str, list[int]]:
        """The blocks taken since the last call that have to be zeroed before they are read, by group."""
        with self._lock:
            taken = {name: group.take_unzeroed() for name, group in self.groups.items() if group.records}
        return {name: blocks for name, blocks in taken.items() if blocks}

    def record_unzeroed(self, blocks: dict[str, list[int]]) -> None:
        """These have to be zeroed again: a load into them has failed."""
        with self._lock:
            for name, ids in blocks.items():
                for block in ids:
                    self.groups[name].record(block)

    def free(self, table: BlockTable) -> None:
        """Give every block of the table back. Freeing a table twice is harmless.

        Raises:
            BlockError: it holds blocks that it was never given; nothing is freed.
        """
        with self._lock:
            if table.freed:
                return
            if any(table.groups.values()) and id(table) not in self._tables:
                raise BlockError(f"{table.owner} frees {table.by_group()}, which belong to somebody else")
            table.freed = True
            if table.lent:
                return
            self._forget(table)
            self.frees += 1
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
            self._forget(table)
            self.frees += 1
        self.tell_listeners()

    def tell_listeners(self) -> None:
        """Call everyone that `on_freed` was given. One that raises harms nobody else."""
        for listener in self._listeners:
            try:
                listener()
            except Exception:
                logger.exception("a listener to freed blocks failed")

    def validate(self) -> None:
        """Check that every block is free or held by as many tables as it says. For tests.

        Raises:
            BlockError: naming the first block that is not.
        """
        with self._lock:
            held: Counter[tuple[str, int]] = Counter(self._pinned)
            for table in self._tables.values():
                for name, ids in table.groups.items():
                    held.update((name, block) for block in ids if block != NO_BLOCK)
                held.update(table.scratch.items())
            for name, group in self.groups.items():
                if len(group.free) + len(group.holders) != group.num_blocks:
                    raise BlockError(f"{len(group.free)} blocks of {name!r} are free, {len(group.holders)} held")
                for block, holders in group.holders.items():
                    if held[name, block] != holders or block in group.free:
                        raise BlockError(f"block {block} of {name!r} has {holders} holders, {held[name, block]} found")

    def _new_table(self, owner: str) -> BlockTable:
        table = BlockTable(owner, {name: [] for name in self.groups})
        self._tables[id(table)] = table
        return table

    def _forget(self, table: BlockTable) -> None:
        # From the end, so that the beginning, which more sequences share, stays in the cache for longer.
        for name, ids in table.groups.items():
            for block in reversed(ids):
                if block != NO_BLOCK:
                    self.groups[name].drop(block)
        for name, slot in table.scratch.items():
            self.groups[name].drop(slot)
        table.scratch.clear()
        self._tables.pop(id(table), None)

    def _extend(self, table: BlockTable, num_tokens: int, computed: int, whole: int, *, record: bool = True) -> bool:
        """`whole` is what groups that keep every token get blocks for."""
        wanted: list[tuple[BlockGroup, list[int], int, int]] = []
        for name, group in self.groups.items():
            ids = table.groups.setdefault(name, [])
            first = group.kind.first_visible(computed) // self.block_size
            end = 1 if group.is_state else self.blocks_for(num_tokens if group.kind.drops else whole)
            skipped = max(0, min(first, end) - len(ids))
            count = max(0, end - len(ids) - skipped)
            if count > len(group.free):
                return False
            wanted.append((group, ids, skipped, count))
        for group, ids, skipped, count in wanted:
            ids.extend([NO_BLOCK] * skipped)
            ids.extend(group.take(record=record) for _ in range(count))
        return True

    def _take_hit(self, table: BlockTable, tokens: Sequence[int], chain: HashChain) -> tuple[int, list[BlockCopy]]:
        """Fill the table with what the cache has. The copies have no destination yet."""
        hit = find_hit(self.groups.values(), tokens, chain, self.block_size) if self.prefix_cache else None
        if hit is None:
            return 0, []
        copies: list[BlockCopy] = []
        cached = hit.num_blocks * self.block_size + hit.shared
        for name, ids in table.groups.items():
            group = self.groups[name]
            if group.is_state:
                slot = group.index.find(hit.hashes[hit.num_blocks - 1])
                assert slot is not None
                copies.append(self._pin(name, slot))
                continue
            first = group.kind.first_visible(cached) // self.block_size
            for block in range(hit.num_blocks):
                found = group.index.find(hit.hashes[block]) if block >= first else None
                ids.append(NO_BLOCK if found is None else group.share(found))
            if hit.shared:
                copies.append(self._pin(name, hit.sources[name]))
        table.published = hit.num_blocks
        return cached, copies

    def _pin(self, name: str, block: int) -> BlockCopy:
        self.groups[name].share(block)
        self._pinned[name, block] += 1
        return BlockCopy(group=name, source=block, destination=NO_BLOCK)

    def _unpin(self, name: str, block: int) -> None:
        self._pinned[name, block] -= 1
        if not self._pinned[name, block]:
            del self._pinned[name, block]
        self.groups[name].drop(block)

    def _place_copies(self, table: BlockTable, cached: int, copies: list[BlockCopy]) -> list[BlockCopy]:
        """The copies go to the block that the next token is written into; a state to the running column."""
        placed = []
        for copy in copies:
            column = 0 if self.groups[copy.group].is_state else cached // self.block_size
            placed.append(BlockCopy(group=copy.group, source=copy.source, destination=table.groups[copy.group][column]))
        return placed
