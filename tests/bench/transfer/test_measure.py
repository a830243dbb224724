"""The rounds, with contenders that are scripted."""

from collections.abc import Iterator
from typing import cast

import pytest

from bench.errors import WrongBytes
from bench.transfer.contender import CONTENDERS, Entry
from bench.transfer.grid import KIB, Cell
from bench.transfer.measure import CELL_BUDGET_S, LEAST_ROUNDS, WARM_UP_ROUNDS, Measurement
from bench.transfer.memory import MappedMemory, Pages
from bench.transfer.pairs import Pair, Sample
from connector.transport.base import Op

CELL = Cell(4 * KIB, 4)
Call = tuple[str, list[int], list[int]]


class Scripted:
    """A pair that copies at once, says that it took `takes_us`, and writes down what it was told."""

    def __init__(
        self, name: str, memories: tuple[MappedMemory, MappedMemory], calls: list[Call], honest: bool = True
    ) -> None:
        self.entry: Entry = CONTENDERS[name]
        self._here, self._there = (memory.array.reshape(-1, CELL.page_bytes) for memory in memories)
        self._calls = calls
        self._honest = honest

    def operate(self, op: Op, local: Pages, remote: Pages) -> Sample:
        self._calls.append((self.entry.name, local.tolist(), remote.tolist()))
        if op == "read":
            self._here[local] = self._there[remote]
        else:
            self._there[remote] = self._here[local]
        if not self._honest:
            self._here[local[0], -1] ^= 1
            self._there[remote[0], -1] ^= 1
        return Sample(1.0, None)


class Clock:
    """Goes on by `step_s` each time it is read."""

    def __init__(self, step_s: float) -> None:
        self._now = 0.0
        self._step_s = step_s

    def __call__(self) -> float:
        self._now += self._step_s
        return self._now


@pytest.fixture
def memories() -> Iterator[tuple[MappedMemory, MappedMemory]]:
    here, there = (MappedMemory.create(name, 32 * CELL.page_bytes) for name in ("here", "there"))
    yield here, there
    here.close()
    there.close()


def measurement(
    memories: tuple[MappedMemory, MappedMemory], calls: list[Call], *, seed: int = 0, step_s: float = 0.0
) -> Measurement:
    pairs = [Scripted(name, memories, calls) for name in ("memcpy", "shm", "ucx")]
    return Measurement(cast(list[Pair], pairs), *memories, seed=seed, clock=Clock(step_s))


@pytest.mark.parametrize("op", ["read", "write"])
def test_every_round_has_one_operation_of_each(op: Op, memories: tuple[MappedMemory, MappedMemory]) -> None:
    calls: list[Call] = []
    told = measurement(memories, calls).run_cell(CELL, op, 10)
    assert {name: len(samples) for name, samples in told.samples.items()} == {"memcpy": 10, "shm": 10, "ucx": 10}
    names = [name for name, _, _ in calls]
    rounds = [names[start : start + 3] for start in range(0, len(names), 3)]
    assert len(rounds) == 1 + WARM_UP_ROUNDS + 10  # one check of each first
    assert all(sorted(each) == ["memcpy", "shm", "ucx"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1


def test_no_two_operations_move_the_same_pages(memories: tuple[MappedMemory, MappedMemory]) -> None:
    calls: list[Call] = []
    measurement(memories, calls).run_cell(CELL, "read", 5)
    assert len({tuple(local) for _, local, _ in calls}) == len(calls)
    assert all(local != remote for _, local, remote in calls)


def test_the_seed_decides_order_and_pages(memories: tuple[MappedMemory, MappedMemory]) -> None:
    told: dict[str, list[Call]] = {"first": [], "again": [], "other": []}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        measurement(memories, told[name], seed=seed).run_cell(CELL, "read", 5)
    assert told["first"] == told["again"]
    assert told["first"] != told["other"]


def test_a_cell_that_takes_long_ends_early_with_its_least_rounds(memories: tuple[MappedMemory, MappedMemory]) -> None:
    told = measurement(memories, [], step_s=CELL_BUDGET_S).run_cell(CELL, "read", 500)
    assert len(told.samples["shm"]) == LEAST_ROUNDS


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_contender_that_moves_wrong_bytes_ends_the_measurement(
    op: Op, memories: tuple[MappedMemory, MappedMemory]
) -> None:
    pairs = [Scripted("shm", memories, [], honest=False)]
    with pytest.raises(WrongBytes, match=f"shm, {op} of 4 KiB x 4"):
        Measurement(cast(list[Pair], pairs), *memories, seed=0).run_cell(CELL, op, 1)
