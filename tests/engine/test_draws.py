"""The numbers behind the draws: fixed, uniform, and unrelated to each other."""

from __future__ import annotations

import numpy as np

from engine.draws import uniforms


def splitmix64(x: int) -> int:
    """The published function, in Python's integers."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def draw(seeds: list[int], positions: list[int]) -> list[float]:
    return [float(x) for x in uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))]


def test_the_numbers_never_change() -> None:
    mask = (1 << 64) - 1
    for seed, position in ((0, 0), (1, 0), (0, 1), (12345, 678), (mask, mask), (2**63, 40000)):
        expected = splitmix64((splitmix64(seed) + position * 0x9E3779B97F4A7C15) & mask) >> 11
        assert draw([seed], [position]) == [expected * 2.0**-53]


def test_each_depends_on_its_own_seed_and_position_only() -> None:
    together = draw([1, 2, 3], [7, 8, 9])
    assert together == [*draw([1], [7]), *draw([2], [8]), *draw([3], [9])]


def test_they_are_uniform_along_positions_and_along_seeds() -> None:
    count = 20000
    for seeds, positions in (([5] * count, list(range(count))), (list(range(count)), [5] * count)):
        numbers = np.array(draw(seeds, positions))
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        histogram, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert abs(histogram / count - 0.05).max() < 0.006
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
        assert len(np.unique(numbers)) == count
