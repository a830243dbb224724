"""What is told of a measurement: the JSON that scripts rely on, and tables for people."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.table import Table

from bench.machine import Machine
from bench.statistics import Spread


class DecodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that drew one token for each of `batch` sequences, in ms: the whole step and its parts.

    `limit_ms` is what reading the weights and the KV would take, `compute_limit_ms` what the products would. They are
    taken of the same round as the steps, `fraction` is the median over the rounds of limit over step, and
    `machine_fraction` that of the larger of the two.
    """

    batch: int
    context: int
    steps: int
    step_ms: Spread
    schedule_ms: Spread
    build_ms: Spread
    forward_ms: Spread
    sample_ms: Spread
    limit_ms: float
    compute_limit_ms: float
    fraction: float
    machine_fraction: float


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that computed a chunk of a prompt. `products_per_s` are the engine's in linear layers, in the time of the
    whole step; `fraction` is that over the fastest way to multiply."""

    chunk: int
    steps: int
    tokens_per_s: Spread
    fraction: float


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`read_gb_per_s` is what the threads in use read; `gflops` by way to multiply, in the model's shapes."""

    read_gb_per_s: Spread
    gflops: dict[str, Spread]
    weight_bytes: int
    kv_bytes_per_sequence: int


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    limits: Limits
    decode: list[DecodeRow]
    prefill: PrefillRow


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """By batch size; `overhead_ms` (scheduling, batch building, sampling) at the largest."""

    decode_ms: dict[str, float]
    decode_limit_ms: dict[str, float]
    decode_fraction: dict[str, float]
    prefill_tokens_per_s: float
    prefill_fraction: float
    overhead_ms: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole, as `--json` writes it."""

    bench: str
    version: str
    machine: Machine
    settings: dict[str, object]
    results: Results
    summary: Summary


def summary_of(results: Results) -> Summary:
    """The numbers that targets are about."""
    last = results.decode[-1]
    return Summary(
        decode_ms={str(row.batch): row.step_ms.median for row in results.decode},
        decode_limit_ms={str(row.batch): row.limit_ms for row in results.decode},
        decode_fraction={str(row.batch): row.fraction for row in results.decode},
        prefill_tokens_per_s=results.prefill.tokens_per_s.median,
        prefill_fraction=results.prefill.fraction,
        overhead_ms=last.schedule_ms.median + last.build_ms.median + last.sample_ms.median,
    )


def decode_table(rows: Sequence[DecodeRow]) -> Table:
    """A line for each batch size."""
    table = Table(title="One token for each sequence: median ms")
    for name in ("batch", "step", "middle half", "beside model", "reading", "of that", "products", "of both"):
        table.add_column(name, justify="right")
    for row in rows:
        beside = row.schedule_ms.median + row.build_ms.median + row.sample_ms.median
        table.add_row(
            str(row.batch),
            f"{row.step_ms.median:.2f}",
            f"{row.step_ms.lower:.2f} to {row.step_ms.upper:.2f}",
            f"{beside:.2f}",
            f"{row.limit_ms:.2f}",
            f"{row.fraction:.0%}",
            f"{row.compute_limit_ms:.2f}",
            f"{row.machine_fraction:.0%}",
        )
    return table


def limits_table(results: Results) -> Table:
    """What the machine allows, and what prefill makes of it."""
    limits, prefill = results.limits, results.prefill
    table = Table(title=f"The machine, and prefill in chunks of {prefill.chunk} tokens")
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_column("middle half", justify="right")
    lines = [("reading memory, GB/s", limits.read_gb_per_s)]
    lines += [(f"linear layers, {way}, GFLOP/s", spread) for way, spread in limits.gflops.items()]
    lines += [("prefill, tokens/s", prefill.tokens_per_s)]
    for name, spread in lines:
        table.add_row(name, f"{spread.median:.1f}", f"{spread.lower:.1f} to {spread.upper:.1f}")
    table.add_row("prefill, of the fastest linear layers", f"{prefill.fraction:.0%}", "")
    return table
