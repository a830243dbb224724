"""What is told of a measurement: the JSON that scripts rely on, and a table for people.

A row's ratios and the summary are paired: above 1 means that the row's transport is faster. A transport that was kept
to TCP is compared with the NIXL that was kept to TCP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from rich.table import Table

from bench.machine import Machine
from bench.statistics import geometric_mean, paired_ratio, spread
from bench.transfer.grid import in_units
from bench.transfer.measure import OPS, Measured
from bench.transfer.pairs import Sample
from connector.transport.base import Op


class Ratios(msgspec.Struct, frozen=True, kw_only=True):
    """How many times faster than each of them; None where there was no such contender, or it is the same."""

    vs_memcpy: float | None
    vs_nixl: float | None
    vs_mooncake: float | None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender, operation and cell. Times in µs; `notified_us` is None where there is no notice.

    `lower_us` and `upper_us` enclose the middle half of the rounds, `iqr_us` is how far they lie apart.
    """

    transport: str
    op: Op
    page_bytes: int
    pages: int
    median_us: float
    p99_us: float
    gb_per_s: float
    notified_us: float | None
    notified_p99_us: float | None
    lower_us: float
    upper_us: float
    iqr_us: float
    rounds: int
    ratios: Ratios


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole, as `--json` writes it."""

    bench: str
    version: str
    machine: Machine
    settings: dict[str, object]
    results: list[Row]
    summary: dict[str, dict[Op, Ratios]]


MEASURED_AGAINST: Final = ("memcpy", "nixl", "mooncake")


def opponent(transport: str, against: str) -> str:
    """Whom `transport` is compared with where the summary says `vs_<against>`."""
    return f"{against}-tcp" if against == "nixl" and transport.endswith("tcp") else against


def rows_of(measured: Measured) -> list[Row]:
    """A row for each contender."""
    return [_row(measured, name, samples) for name, samples in measured.samples.items()]


def _row(measured: Measured, name: str, samples: Sequence[Sample]) -> Row:
    done = spread([sample.done_us for sample in samples])
    noticed = [sample.notified_us for sample in samples if sample.notified_us is not None]
    notified = spread(noticed) if noticed else None
    return Row(
        transport=name,
        op=measured.op,
        page_bytes=measured.cell.page_bytes,
        pages=measured.cell.pages,
        median_us=round(done.median, 2),
        p99_us=round(done.p99, 2),
        gb_per_s=round(measured.cell.total_bytes / done.median / 1e3, 4),
        notified_us=round(notified.median, 2) if notified else None,
        notified_p99_us=round(notified.p99, 2) if notified else None,
        lower_us=round(done.lower, 2),
        upper_us=round(done.upper, 2),
        iqr_us=round(done.interquartile_range, 2),
        rounds=len(samples),
        ratios=_ratios({against: _ratio(measured.samples, name, against) for against in MEASURED_AGAINST}),
    )


def _ratio(samples: Mapping[str, Sequence[Sample]], name: str, against: str) -> float | None:
    theirs = opponent(name, against)
    if theirs == name or theirs not in samples:
        return None
    ours_us, theirs_us = ([sample.done_us for sample in samples[who]] for who in (name, theirs))
    return round(paired_ratio(ours_us, theirs_us), 4)


def _ratios(by_opponent: Mapping[str, float | None]) -> Ratios:
    return Ratios(**{f"vs_{against}": by_opponent[against] for against in MEASURED_AGAINST})


def summary_of(rows: Sequence[Row]) -> dict[str, dict[Op, Ratios]]:
    """For each transport and operation the geometric means of its rows' ratios over the grid."""
    return {
        transport: {op: _mean([row.ratios for row in rows if (row.transport, row.op) == (transport, op)]) for op in OPS}
        for transport in dict.fromkeys(row.transport for row in rows)
    }


def _mean(ratios: Sequence[Ratios]) -> Ratios:
    means = {}
    for against in MEASURED_AGAINST:
        known = [value for each in ratios if (value := getattr(each, f"vs_{against}")) is not None]
        mean = geometric_mean(known)
        means[against] = None if mean is None else round(mean, 4)
    return _ratios(means)


def results_table(rows: Sequence[Row], op: Op) -> Table:
    """Median µs of every cell and contender, and below it how long the target's notice took, for a WRITE."""
    transports = list(dict.fromkeys(row.transport for row in rows))
    table = Table("pages of", "count", *transports, title=f"{op.upper()}: median µs (GB/s)")
    for column in table.columns:
        column.justify = "right"
    by_cell: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows:
        if row.op == op:
            by_cell.setdefault((row.page_bytes, row.pages), {})[row.transport] = row
    for (page_bytes, pages), by_transport in by_cell.items():
        shown = [by_transport[name] for name in transports]
        table.add_row(in_units(page_bytes), str(pages), *(_cell_text(row) for row in shown))
    return table


def _cell_text(row: Row) -> str:
    notice = "" if row.notified_us is None else f"\nnotice {row.notified_us:,.0f}"
    return f"{row.median_us:,.0f} ({row.gb_per_s:.2f}){notice}"


def summary_table(summary: Mapping[str, Mapping[Op, Ratios]]) -> Table:
    """The geometric means."""
    table = Table("", *(f"{op} {against}" for op in OPS for against in MEASURED_AGAINST))
    table.title = "Times faster than, geometric mean over the grid of paired ratios"
    for transport, by_op in summary.items():
        values = [getattr(by_op[op], f"vs_{against}") for op in OPS for against in MEASURED_AGAINST]
        table.add_row(transport, *("-" if value is None else f"{value:.2f}" for value in values))
    return table
