"""What is moved: page sizes times page counts, from pages drawn at random on both sides."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

KIB: Final = 1 << 10
MIB: Final = 1 << 20
PAGE_BYTES: Final = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB)
PAGES: Final = (1, 64, 1024)
CELL_LIMIT_BYTES: Final = 512 * MIB
QUICK_PAGE_BYTES: Final = (4 * KIB, 64 * KIB)
QUICK_PAGES: Final = (1, 64)
ROOM: Final = 2
"""A region has this many times the pages of its largest cell, so that drawn pages lie apart."""


class Cell(msgspec.Struct, frozen=True, order=True):
    """`pages` pages of `page_bytes` bytes each, moved by one operation."""

    page_bytes: int
    pages: int

    @property
    def total_bytes(self) -> int:
        """Bytes that one operation moves."""
        return self.page_bytes * self.pages

    def __str__(self) -> str:
        return f"{in_units(self.page_bytes)} x {self.pages}"


class Grid(msgspec.Struct, frozen=True):
    """What is measured, and what is left out for its size."""

    cells: tuple[Cell, ...]
    left_out: tuple[Cell, ...]

    @property
    def region_bytes(self) -> int:
        """The memory that either side needs."""
        return ROOM * max(cell.total_bytes for cell in self.cells)


def build_grid(*, quick: bool, full: bool) -> Grid:
    """All cells; without `full` those over `CELL_LIMIT_BYTES` are left out. `quick` is a few small ones, for tests."""
    sizes, counts = (QUICK_PAGE_BYTES, QUICK_PAGES) if quick else (PAGE_BYTES, PAGES)
    cells = [Cell(page_bytes, pages) for page_bytes in sizes for pages in counts]
    kept = tuple(cell for cell in cells if full or cell.total_bytes <= CELL_LIMIT_BYTES)
    return Grid(kept, tuple(cell for cell in cells if cell not in kept))


def draw_pages(rng: np.random.Generator, cell: Cell, region_bytes: int) -> npt.NDArray[np.int32]:
    """`cell.pages` different page ids of a region, in random order."""
    ids = rng.choice(region_bytes // cell.page_bytes, cell.pages, replace=False, shuffle=True)
    return ids.astype(np.int32)


def in_units(num_bytes: int) -> str:
    """As people say it: 65536 is "64 KiB"."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"
