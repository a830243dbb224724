"""Memory for weights, in huge pages where the kernel gives them.

A weight is read from front to back in every step; through pages of 4 KiB that took half again as long on one core.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE = 2 << 20
ALIGNMENT = 64


class HugePages:
    """`num_bytes` of memory, handed out piece by piece; each piece keeps all of it."""

    def __init__(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them, or no Linux
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        begin = -whole.data_ptr() % HUGE
        self._rest = whole[begin : begin + num_bytes]

    @staticmethod
    def size(elements: int, dtype: torch.dtype) -> int:
        """Bytes that a piece takes."""
        return -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def take(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The next piece, [elements].

        Raises:
            ValueError: there is not enough left.
        """
        size = self.size(elements, dtype)
        if size > len(self._rest):
            raise ValueError(f"{size} bytes are asked for, {len(self._rest)} are left")
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece.view(dtype)[:elements]
