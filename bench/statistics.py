"""The numbers that are told of a measurement. No cleverness: medians, quantiles, geometric means."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np


class Spread(msgspec.Struct, frozen=True):
    """Of one row's operations, in the unit of the samples. Between `lower` and `upper` lies the middle half."""

    median: float
    p99: float
    lower: float
    upper: float

    @property
    def interquartile_range(self) -> float:
        """How far the middle half reaches."""
        return self.upper - self.lower


def spread(samples: Sequence[float]) -> Spread:
    """Quantiles, interpolated between samples; `samples` must not be empty."""
    median, p99, lower, upper = np.quantile(np.asarray(samples, dtype=np.float64), [0.5, 0.99, 0.25, 0.75])
    return Spread(float(median), float(p99), float(lower), float(upper))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times faster `ours` is: the median over the rounds of their time over ours in the same round."""
    return float(np.median(np.asarray(theirs, dtype=np.float64) / np.asarray(ours, dtype=np.float64)))


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """None of no ratios."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
