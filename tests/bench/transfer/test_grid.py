"""What is measured, and what is drawn."""

import numpy as np

from bench.transfer.grid import CELL_LIMIT_BYTES, KIB, MIB, Cell, build_grid, draw_pages


def test_the_grid_is_six_sizes_times_three_counts_without_what_is_too_large() -> None:
    grid = build_grid(quick=False, full=False)
    assert len(grid.cells) == 16
    assert grid.left_out == (Cell(MIB, 1024), Cell(2 * MIB, 1024))
    assert max(cell.total_bytes for cell in grid.cells) <= CELL_LIMIT_BYTES


def test_full_leaves_nothing_out() -> None:
    grid = build_grid(quick=False, full=True)
    assert len(grid.cells) == 18
    assert grid.left_out == ()
    assert grid.region_bytes >= 2 << 30


def test_quick_fits_anywhere() -> None:
    assert build_grid(quick=True, full=False).region_bytes <= 16 * MIB


def test_every_cell_has_whole_pages_in_a_region() -> None:
    grid = build_grid(quick=False, full=True)
    assert all(grid.region_bytes % cell.page_bytes == 0 for cell in grid.cells)


def test_drawn_pages_are_different_inside_the_region_and_follow_from_the_seed() -> None:
    cell = Cell(4 * KIB, 64)
    pages = draw_pages(np.random.default_rng(7), cell, 1 * MIB)
    assert len(set(pages.tolist())) == 64
    assert pages.min() >= 0
    assert pages.max() < 256
    assert pages.tolist() != sorted(pages.tolist())
    assert pages.tolist() == draw_pages(np.random.default_rng(7), cell, 1 * MIB).tolist()
    assert pages.tolist() != draw_pages(np.random.default_rng(8), cell, 1 * MIB).tolist()


def test_a_cell_is_shown_in_units() -> None:
    assert str(Cell(64 * KIB, 1024)) == "64 KiB x 1024"
    assert str(Cell(2 * MIB, 1)) == "2 MiB x 1"
