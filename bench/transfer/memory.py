"""The two memories that every contender moves pages between, and the proof that it did.

All contenders use the same two memfds: each sees equally cold caches and the same physical pages, and the measuring
process can write and check both sides by itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from bench.errors import WrongBytes
from connector.transport.base import Memory

Pages = npt.NDArray[np.int32]


class MappedMemory:
    """One memfd, mapped and touched, so that no measurement pays for a page's first use."""

    def __init__(self, fd: int) -> None:
        length = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.memory = Memory(address=int(self.array.ctypes.data), length=length, fd=fd)

    @classmethod
    def create(cls, name: str, length: int) -> MappedMemory:
        """A new memfd of `length` bytes."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return cls(fd)

    @property
    def fd(self) -> int:
        """The memfd."""
        assert self.memory.fd is not None
        return self.memory.fd

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the process."""
        os.close(self.fd)


def write_pattern(memory: MappedMemory, page_bytes: int, pages: Pages, seed: int) -> None:
    """Give each page words that depend on the seed, the page's place in `pages` and the word's place in the page."""
    by_page = memory.array.view(np.uint64).reshape(-1, page_bytes // 8)
    for place, page in enumerate(pages):
        by_page[page] = _words(seed, place, page_bytes)


def erase(memory: MappedMemory, page_bytes: int, pages: Pages) -> None:
    """Zero the pages."""
    memory.array.reshape(-1, page_bytes)[pages] = 0


def check_pattern(memory: MappedMemory, page_bytes: int, pages: Pages, seed: int, what: str) -> None:
    """Prove that the pages hold what `write_pattern` wrote on the other side.

    Raises:
        WrongBytes: with the first page that does not.
    """
    by_page = memory.array.view(np.uint64).reshape(-1, page_bytes // 8)
    for place, page in enumerate(pages):
        wrong = np.flatnonzero(by_page[page] != _words(seed, place, page_bytes))
        if wrong.size:
            raise WrongBytes(
                f"{what}: page {place} of {len(pages)} (id {page}) differs from its source in {wrong.size} of "
                f"{page_bytes // 8} words, first at byte {int(wrong[0]) * 8}"
            )


def _words(seed: int, place: int, page_bytes: int) -> npt.NDArray[np.uint64]:
    words = np.arange(page_bytes // 8, dtype=np.uint64)
    words += np.uint64((seed * 0x9E3779B97F4A7C15 + place * 0xBF58476D1CE4E5B9 + 1) % (1 << 64))
    words *= np.uint64(0x94D049BB133111EB)
    return words
