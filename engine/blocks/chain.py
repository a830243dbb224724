"""Hashes of blocks by content: equal hashes mean equal tokens from the start of the sequence on, under the same salts.

Each hash covers its parent's, so that one value stands for a whole prefix. The root covers everything else that keys
and values depend on: the model's weights, the adapter, and the salt that a caller keeps others out with. BLAKE2b with
128 bits: nobody can make two prompts collide, which would show one caller's text to another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

DIGEST_BYTES = 16


def root_hash(model: str, adapter: str = "", cache_salt: str = "") -> bytes:
    """What every chain of one model, adapter and salt begins with."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (model, adapter, cache_salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


class HashChain:
    """The hashes of a sequence's full blocks, computed as far as they are asked for."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self.block_size = block_size
        self._hashes: list[bytes] = []

    def of(self, tokens: Sequence[int], num_blocks: int) -> list[bytes]:
        """The hashes of at least the first `num_blocks` blocks of `tokens`, which only grow at their end."""
        size = self.block_size
        while len(self._hashes) < num_blocks:
            start = len(self._hashes) * size
            block = np.array(tokens[start : start + size], dtype=np.uint32)
            if len(block) < size:
                raise ValueError(f"block {len(self._hashes)} of {len(tokens)} tokens is not full")
            parent = self.parent(len(self._hashes))
            self._hashes.append(hashlib.blake2b(block.tobytes(), key=parent, digest_size=DIGEST_BYTES).digest())
        return self._hashes

    def parent(self, block: int) -> bytes:
        """The hash before block number `block`."""
        return self._hashes[block - 1] if block else self.root
