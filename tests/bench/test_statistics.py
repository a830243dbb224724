"""Medians, quantiles and ratios on numbers that can be checked by hand."""

import pytest

from bench.statistics import geometric_mean, paired_ratio, spread


def test_a_spread_is_interpolated_quantiles() -> None:
    told = spread([float(number) for number in range(101)])
    assert (told.median, told.p99, told.lower, told.upper) == (50.0, 99.0, 25.0, 75.0)
    assert told.interquartile_range == 50.0


def test_one_sample_is_its_own_median_and_has_no_spread() -> None:
    told = spread([3.5])
    assert (told.median, told.p99, told.interquartile_range) == (3.5, 3.5, 0.0)


def test_a_ratio_is_taken_round_by_round() -> None:
    # The medians are equal; in each round but one theirs took twice as long.
    assert paired_ratio([1.0, 2.0, 4.0], [2.0, 4.0, 2.0]) == 2.0


def test_above_one_means_that_ours_is_faster() -> None:
    assert paired_ratio([1.0], [4.0]) == 4.0
    assert paired_ratio([4.0], [1.0]) == 0.25


def test_a_geometric_mean_of_reciprocals_is_one() -> None:
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1.0)
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([]) is None
