"""What the prefix cache has of a prompt: as much as every group agrees on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.blocks.chain import HashChain
from engine.blocks.group import BlockGroup


class Hit(msgspec.Struct, frozen=True):
    """The first `num_blocks` blocks, and `shared` tokens of the next one: the beginning of `sources`, by group.

    `hashes` are those of at least `num_blocks` blocks.
    """

    num_blocks: int
    hashes: Sequence[bytes]
    shared: int
    sources: dict[str, int]


def find_hit(groups: Iterable[BlockGroup], tokens: Sequence[int], chain: HashChain, block_size: int) -> Hit | None:
    """Look a prompt up. At least one token is left to be computed, for the next one is drawn from its logits."""
    groups = list(groups)
    limit = len(tokens) - 1
    if limit < 1:
        return None
    most = limit // block_size
    hashes = chain.of(tokens, most)
    num_blocks = _agreed(groups, most, hashes, block_size)
    start = num_blocks * block_size
    shared, sources = _beginning(groups, tokens[start : min(start + block_size, limit)], chain.parent(num_blocks))
    return Hit(num_blocks, hashes, shared, sources) if num_blocks or shared else None


def _agreed(groups: Sequence[BlockGroup], most: int, hashes: Sequence[bytes], block_size: int) -> int:
    """The most leading blocks that every group can be resumed after."""
    while True:
        agreed = most
        for group in groups:
            agreed = group.kind.longest(agreed, hashes, group.index, block_size)
        if agreed == most:
            return agreed
        most = agreed


def _beginning(groups: Sequence[BlockGroup], wanted: Sequence[int], parent: bytes) -> tuple[int, dict[str, int]]:
    """How many tokens of the next block every group has somewhere, and where. A state cannot be cut."""
    if not wanted or any(group.is_state for group in groups):
        return 0, {}
    shared = len(wanted)
    sources: dict[str, int] = {}
    for group in groups:
        found = group.index.find_beginning(parent, wanted)
        if found is None:
            return 0, {}
        sources[group.name] = found[0]
        shared = min(shared, found[1])
    return shared, sources
