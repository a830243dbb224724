"""Which tokens of the source's blocks go where in the destination's: block ids become arrays of chunks.

Both sides name blocks in the order of the tokens, and both lists end with the block that holds the last token: they are
aligned at their ends. They may differ in length, because the destination names only what it lacks, and because groups
that drop old tokens may name fewer. Where the block sizes differ, a chunk is what lies within one block on either side.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from connector.errors import PlanError
from connector.pages import GroupPages, PoolGeometry
from connector.transport.base import Offsets

KEEPS_EVERY_TOKEN = ("full", "latent")


class Chunks(msgspec.Struct, frozen=True):
    """`tokens` consecutive tokens each: block and first row within it, on either side, in the order of the tokens."""

    tokens: int
    source_block: Offsets
    source_row: Offsets
    destination_block: Offsets
    destination_row: Offsets


class Correspondence:
    """The blocks of one group, of which the destination has those of the first `local_tokens` tokens already.

    `first_token` is the first that is moved, `num_tokens` is where they end. Of a state group these are slots.

    Raises:
        PlanError: the ids are not blocks of the pools, or the source lacks what the destination wants.
    """

    def __init__(
        self,
        source: PoolGeometry,
        source_blocks: Sequence[int],
        destination: PoolGeometry,
        destination_blocks: Sequence[int],
        group: str,
        num_tokens: int,
        local_tokens: int = 0,
    ) -> None:
        theirs = check_blocks(source, group, source_blocks, num_tokens, whose="the source")
        ours = check_blocks(
            destination, group, destination_blocks, num_tokens, whose="the destination", local_tokens=local_tokens
        )
        pages = destination.group(group)
        self._source_rows = source.tokens_per_block(source.group(group))
        self._destination_rows = destination.tokens_per_block(pages)
        self.num_tokens = max(len(theirs), len(ours)) if pages.kind == "state" else num_tokens
        self.source = theirs
        self.destination = ours
        self._source_from = _first_row(theirs, self._source_rows, self.num_tokens)
        self.first_token = _first_row(ours, self._destination_rows, self.num_tokens)
        if self.first_token < self._source_from:
            raise PlanError(
                f"the destination wants group {group!r} from token {self.first_token}, the source's {len(theirs)} "
                f"blocks begin with token {self._source_from} of {self.num_tokens}"
            )

    def chunks(self, first: int, end: int) -> list[Chunks]:
        """The tokens from `first` to before `end`, by length. Where both sides' blocks are alike, blocks move whole,
        also a last one that is partly filled."""
        first = max(first, self.first_token)
        if first >= end:
            return []
        rows = self._source_rows
        if rows == self._destination_rows:
            low, high = first // rows, -(-end // rows)
            nothing = np.zeros(high - low, dtype=np.int64)
            theirs = self.source[low - self._source_from // rows : high - self._source_from // rows]
            ours = self.destination[low - self.first_token // rows : high - self.first_token // rows]
            return [Chunks(rows, theirs, nothing, ours, nothing)]
        return self._split(first, end)

    def _split(self, first: int, end: int) -> list[Chunks]:
        edges = np.unique(
            np.concatenate([
                np.arange(first - first % rows + rows, end, rows, dtype=np.int64)
                for rows in (self._source_rows, self._destination_rows)
            ] + [np.array([first, end], dtype=np.int64)])
        )  # fmt: skip
        starts, lengths = edges[:-1], np.diff(edges)
        return [self._of_length(int(tokens), starts[lengths == tokens]) for tokens in np.unique(lengths)]

    def _of_length(self, tokens: int, starts: Offsets) -> Chunks:
        theirs, ours = starts - self._source_from, starts - self.first_token
        return Chunks(
            tokens,
            self.source[theirs // self._source_rows],
            theirs % self._source_rows,
            self.destination[ours // self._destination_rows],
            ours % self._destination_rows,
        )


def check_blocks(
    geometry: PoolGeometry,
    group_name: str,
    block_ids: Sequence[int],
    num_tokens: int,
    *,
    whose: str,
    local_tokens: int = 0,
) -> Offsets:
    """The ids as an array, proved to be blocks of this pool that can hold exactly the tokens from `local_tokens` to
    before `num_tokens`. Groups that drop old tokens may name fewer; a state group names as many slots as it likes.

    Raises:
        PlanError: no tokens, another number of blocks, an id outside the pool, or one named twice.
    """
    group = geometry.group(group_name)
    _check_count(geometry, group, len(block_ids), num_tokens, local_tokens, whose)
    try:
        ids = np.array(block_ids, dtype=np.int64).reshape(len(block_ids))
    except (OverflowError, TypeError, ValueError) as error:
        raise PlanError(f"{whose} names block ids of group {group_name!r} that are not integers: {error}") from error
    outside = ids[(ids < 0) | (ids >= group.num_blocks)]
    if outside.size:
        raise PlanError(
            f"{whose} names block {outside[0]} of group {group_name!r}, which has {group.num_blocks} blocks"
        )
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PlanError(f"{whose} names block {twice[0]} of group {group_name!r} twice")
    return ids


def _check_count(
    geometry: PoolGeometry, group: GroupPages, count: int, num_tokens: int, local_tokens: int, whose: str
) -> None:
    size = geometry.block_size
    if not 0 <= local_tokens < num_tokens or local_tokens % size:
        raise PlanError(
            f"{whose} has {local_tokens} of {num_tokens} tokens; there must be at least one to move, and blocks of "
            f"{size} tokens are had whole"
        )
    if group.kind == "state":
        return
    needed = -(-num_tokens // size) - local_tokens // size
    if count > needed or (count < needed and group.kind in KEEPS_EVERY_TOKEN):
        raise PlanError(
            f"{whose} names {count} blocks of group {group.name!r} for tokens {local_tokens} to {num_tokens}; "
            f"{needed} blocks of {size} tokens hold them"
        )


def _first_row(blocks: Offsets, rows: int, num_tokens: int) -> int:
    """The first token that the blocks hold, given that the last block holds the last token."""
    return num_tokens if not len(blocks) else (-(-num_tokens // rows) - len(blocks)) * rows
