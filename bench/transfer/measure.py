"""The measurement: in every round every contender does one operation of the same size, in an order drawn anew.

What disturbs the machine for a moment disturbs one round, so that speeds are compared round by round and the median of
those ratios is told. Each contender draws its own pages, so that none finds them in a cache because another has just
moved them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from bench.transfer.grid import Cell, draw_pages
from bench.transfer.memory import MappedMemory, check_pattern, erase, write_pattern
from bench.transfer.pairs import Pair, Sample
from connector.transport.base import Op

OPS: Final[tuple[Op, ...]] = ("read", "write")
WARM_UP_ROUNDS: Final = 2
LEAST_ROUNDS: Final = 15
CELL_BUDGET_S: Final = 20.0
"""After this long a cell ends early, if it has had `LEAST_ROUNDS`."""


class Measured(msgspec.Struct, frozen=True):
    """One cell and operation: by contender, a sample for each round, in the order of the rounds."""

    cell: Cell
    op: Op
    samples: dict[str, list[Sample]]


class Measurement:
    """Drives pairs over two memories. `clock` bounds a cell's time."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        here: MappedMemory,
        there: MappedMemory,
        *,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pairs = list(pairs)
        self._here = here
        self._there = there
        self._rng = np.random.default_rng(seed)
        self._clock = clock

    def run_cell(self, cell: Cell, op: Op, rounds: int) -> Measured:
        """Check every contender's bytes once, warm up, then measure up to `rounds` rounds.

        Raises:
            WrongBytes: a contender does not do what it says.
            ContenderFailed: one broke, or was late.
        """
        for pair in self._pairs:
            self._check(pair, cell, op)
        for _ in range(WARM_UP_ROUNDS):
            self._round(cell, op)
        samples: dict[str, list[Sample]] = {pair.entry.name: [] for pair in self._pairs}
        ends_at = self._clock() + CELL_BUDGET_S
        for number in range(rounds):
            if number >= LEAST_ROUNDS and self._clock() >= ends_at:
                break
            for name, sample in self._round(cell, op).items():
                samples[name].append(sample)
        return Measured(cell, op, samples)

    def prepare(self, page_bytes: int) -> None:
        """Get every contender ready for pages of that size."""
        for pair in self._pairs:
            pair.prepare(page_bytes)

    def _round(self, cell: Cell, op: Op) -> dict[str, Sample]:
        order = self._rng.permutation(len(self._pairs))
        return {self._pairs[place].entry.name: self._operate(self._pairs[place], cell, op) for place in order}

    def _operate(self, pair: Pair, cell: Cell, op: Op) -> Sample:
        length = self._here.memory.length
        return pair.operate(op, draw_pages(self._rng, cell, length), draw_pages(self._rng, cell, length))

    def _check(self, pair: Pair, cell: Cell, op: Op) -> None:
        length = self._here.memory.length
        local, remote = draw_pages(self._rng, cell, length), draw_pages(self._rng, cell, length)
        seed = int(self._rng.integers(1 << 62))
        source, destination = (self._there, self._here) if op == "read" else (self._here, self._there)
        sent, landed = (remote, local) if op == "read" else (local, remote)
        write_pattern(source, cell.page_bytes, sent, seed)
        erase(destination, cell.page_bytes, landed)
        pair.operate(op, local, remote)
        check_pattern(destination, cell.page_bytes, landed, seed, f"{pair.entry.name}, {op} of {cell}")
