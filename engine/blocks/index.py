"""Which content lies in which block of one group: the prefix cache's memory.

A full block is found by its hash. A tail, or a full block of which only the beginning is wanted, is found by the hash
before it and its tokens: whoever wants only a part of a block copies it, and goes on in the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SIBLINGS = 8
"""How many blocks with the same parent are looked through for a common beginning, the latest first."""


class Content(msgspec.Struct, frozen=True):
    """What lies in a block: `tokens`, after the prefix that `parent` stands for; `digest` only of a full block."""

    parent: bytes
    tokens: tuple[int, ...]
    digest: bytes | None


class PrefixIndex:
    """See the module."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}  # in the order they came
        self._contents: dict[int, Content] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, block: int) -> bool:
        return block in self._contents

    def find(self, digest: bytes) -> int | None:
        """The block with this content."""
        return self._by_digest.get(digest)

    def find_beginning(self, parent: bytes, wanted: Sequence[int]) -> tuple[int, int] | None:
        """A block that begins with what `wanted` begins with, and how many tokens they share: the most there are."""
        best: tuple[int, int] | None = None
        for block in list(reversed(self._children.get(parent, {})))[:SIBLINGS]:
            shared = _shared(self._contents[block].tokens, wanted)
            if shared > (best[1] if best else 0):
                best = block, shared
        return best

    def add(self, block: int, content: Content) -> bool:
        """Remember what lies in `block`. False when the block is known, or another one has that content."""
        if block in self._contents or (content.digest is not None and content.digest in self._by_digest):
            return False
        self._contents[block] = content
        if content.digest is not None:
            self._by_digest[content.digest] = block
        if content.tokens:
            self._children.setdefault(content.parent, {})[block] = None
        return True

    def remove(self, block: int) -> None:
        """Its content is lost. Harmless for a block that is not known."""
        content = self._contents.pop(block, None)
        if content is None:
            return
        if content.digest is not None:
            del self._by_digest[content.digest]
        if content.tokens:
            siblings = self._children[content.parent]
            del siblings[block]
            if not siblings:
                del self._children[content.parent]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
