"""Memory in huge pages is handed out piece by piece."""

from __future__ import annotations

import pytest
import torch

from engine.huge_pages import ALIGNMENT, HUGE, HugePages


def test_pieces_are_aligned_and_apart() -> None:
    sizes = [1, 33, 4096]
    memory = HugePages(sum(HugePages.size(size, torch.bfloat16) for size in sizes))
    pieces = [memory.take(size, torch.bfloat16).fill_(index) for index, size in enumerate(sizes)]
    assert pieces[0].data_ptr() % HUGE == 0
    assert all(piece.data_ptr() % ALIGNMENT == 0 for piece in pieces)
    assert [set(piece.tolist()) for piece in pieces] == [{0.0}, {1.0}, {2.0}]
    assert [len(piece) for piece in pieces] == sizes


def test_more_than_there_is_cannot_be_taken() -> None:
    memory = HugePages(HugePages.size(100, torch.float32))
    memory.take(50, torch.float32)
    with pytest.raises(ValueError, match="256 bytes are asked for, 192 are left"):
        memory.take(60, torch.float32)


def test_a_piece_outlives_the_rest() -> None:
    piece = HugePages(64).take(16, torch.float32)
    assert piece.fill_(2.0).sum() == 32
