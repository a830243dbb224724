"""`kvferry bench transfer`: checks what was asked for, measures, and tells."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.errors import BadRequest
from bench.machine import this_machine
from bench.transfer import measure, report
from bench.transfer.contender import CONTENDERS, Entry, chosen
from bench.transfer.grid import Grid, build_grid
from bench.transfer.memory import MappedMemory
from bench.transfer.pairs import open_pairs
from bench.transfer.plot import check_plot, write_plot

DEFAULT_ROUNDS = 200
QUICK_ROUNDS = 5


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command line. `rounds` None is the default of the grid chosen."""

    rounds: int | None = None
    quick: bool = False
    full: bool = False
    transports: str | None = None
    json: Path | None = None
    plot: Path | None = None
    seed: int = 0


def run_transfer(options: Options) -> report.Report:
    """Measure, print tables on standard output, and write the files asked for.

    Raises:
        BadRequest: an option cannot be; nothing was measured.
        BenchError: a contender broke, or moved wrong bytes.
    """
    entries = chosen(options.transports)
    grid = build_grid(quick=options.quick, full=options.full)
    rounds = options.rounds if options.rounds is not None else QUICK_ROUNDS if options.quick else DEFAULT_ROUNDS
    if rounds < 1:
        raise BadRequest(f"--rounds is {rounds}; at least one round is needed")
    if options.seed < 0:
        raise BadRequest(f"--seed is {options.seed}; it is a whole number ≥ 0")
    for file in (options.json, options.plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise BadRequest(f"{file} cannot be written: there is no folder {file.absolute().parent}")
    if options.plot is not None:
        check_plot(options.plot)
    _check_memory(grid)
    told = _measure(options, entries, grid, rounds)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
    if options.plot is not None:
        write_plot(told.results, options.plot)
    _print(told)
    return told


def _check_memory(grid: Grid) -> None:
    needed = 2 * grid.region_bytes
    available = int(psutil.virtual_memory().available)
    if needed > available:
        raise BadRequest(
            f"the grid needs {needed >> 20} MiB of memory, {available >> 20} MiB are available; "
            "free some, or measure less: without --full, or with --quick"
        )


def _measure(options: Options, entries: list[Entry], grid: Grid, rounds: int) -> report.Report:
    machine = this_machine()
    here = MappedMemory.create("kvferry-bench-here", grid.region_bytes)
    there = MappedMemory.create("kvferry-bench-there", grid.region_bytes)
    rows: list[report.Row] = []
    with open_pairs(entries, here, there, os.environ) as (pairs, missing), _progress() as progress:
        if not pairs:
            raise BadRequest(f"no transport can run here: {'; '.join(f'{k}: {v}' for k, v in missing.items())}")
        measurement = measure.Measurement(pairs, here, there, seed=options.seed)
        task = progress.add_task("", total=len(grid.cells) * len(measure.OPS))
        for page_bytes in dict.fromkeys(cell.page_bytes for cell in grid.cells):
            measurement.prepare(page_bytes)
            for cell in (cell for cell in grid.cells if cell.page_bytes == page_bytes):
                for op in measure.OPS:
                    progress.update(task, description=f"{op} {cell}")
                    rows += report.rows_of(measurement.run_cell(cell, op, rounds))
                    progress.advance(task)
    here.close()
    there.close()
    return report.Report(
        bench="transfer",
        version=importlib.metadata.version("kvferry"),
        machine=machine,
        settings=_settings(options, entries, grid, rounds, missing),
        results=rows,
        summary=report.summary_of(rows),
    )


def _settings(
    options: Options, entries: list[Entry], grid: Grid, rounds: int, missing: dict[str, str]
) -> dict[str, object]:
    return {
        "seed": options.seed,
        "rounds_at_most": rounds,
        "rounds_at_least": min(rounds, measure.LEAST_ROUNDS),
        "seconds_per_cell": measure.CELL_BUDGET_S,
        "order": "every contender once a round, in an order drawn anew",
        "memory": f"two memfds of {grid.region_bytes} bytes, shared by all contenders; each draws its own page ids",
        "timed": "from page ids to the initiator's knowledge of completion; notified_us to the target's Python code",
        "left_out": [str(cell) for cell in grid.left_out],
        "vs_nixl": "a transport that ends in -tcp is compared with nixl-tcp",
        "ucx_environment": {key: value for key, value in os.environ.items() if key.startswith("UCX_")},
        "contenders": {
            entry.name: {"setup": entry.setup, "waits": entry.waits, "version": _version(entry)} for entry in entries
        },
        "unavailable": missing,
        "not_asked_for": [name for name in CONTENDERS if name not in {entry.name for entry in entries}],
    }


def _version(entry: Entry) -> str | None:
    """Of the distribution that the contender comes from, if it is installed."""
    for distribution in entry.distributions:
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


def _print(told: report.Report) -> None:
    console = Console(highlight=False)
    for op in measure.OPS:
        console.print(report.results_table(told.results, op))
    console.print(report.summary_table(told.summary))
    left_out = told.settings["left_out"]
    if isinstance(left_out, list) and left_out:
        console.print(f"Left out for their size: {', '.join(left_out)}; --full measures them.", soft_wrap=True)
    missing = told.settings["unavailable"]
    if isinstance(missing, dict):
        for name, reason in missing.items():
            console.print(f"Not measured: {name}: {reason}", soft_wrap=True, markup=False)
