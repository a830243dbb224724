"""`kvferry bench engine`: checks what was asked for, measures, and tells.

Everything is measured in rounds, limits and steps in turn, so that what others do on the machine meets both.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.engine import report
from bench.engine.limits import Memory, Products, Work, kv_bytes_read, work_of
from bench.engine.steps import Steps, open_steps
from bench.errors import BadRequest
from bench.machine import this_machine
from bench.statistics import spread
from engine import _native
from engine.assembly import DTYPES
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor import StepTimes
from engine.model_info import inspect_model
from engine.prepack import packed_linear

BATCHES = (1, 4, 16)
ROUNDS = 5
QUICK_ROUNDS = 1
STEPS = 32
"""Steps of a round that draw one token for each sequence."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command line. `context` is the tokens that a sequence has in the middle of a round."""

    model: Path
    context: int = 512
    chunk: int = 512
    rounds: int | None = None
    quick: bool = False
    threads: int = 1
    json: Path | None = None
    seed: int = 0


class _Round(msgspec.Struct, frozen=True):
    """What was measured in turn. `read` is in bytes/s, `products` by way in products/s."""

    read: float
    products: dict[str, float]
    decode: dict[int, list[StepTimes]]
    prefill: list[StepTimes]


def run_engine(options: Options) -> report.Report:
    """Measure, print tables on standard output, and write the file asked for.

    Raises:
        BadRequest: an option cannot be; nothing was measured.
        BenchError: a request failed.
    """
    rounds = options.rounds if options.rounds is not None else QUICK_ROUNDS if options.quick else ROUNDS
    if rounds < 1:
        raise BadRequest(f"--rounds is {rounds}; at least one round is needed")
    for name, value in (("chunk", options.chunk), ("threads", options.threads)):
        if value < 1:
            raise BadRequest(f"--{name} is {value}; it is at least 1")
    if options.context <= STEPS:
        raise BadRequest(f"--context is {options.context}; it is more than {STEPS}, the tokens that a round draws")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise BadRequest(f"{options.json} cannot be written: there is no folder {options.json.absolute().parent}")
    try:
        told = _measure(options, rounds)
    except EngineError as error:
        raise BadRequest(str(error)) from error
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
    console = Console(highlight=False)
    console.print(report.decode_table(told.results.decode))
    console.print(report.limits_table(told.results))
    return told


def _measure(options: Options, rounds: int) -> report.Report:
    info = inspect_model(options.model)
    batches = BATCHES[:2] if options.quick else BATCHES
    config = EngineConfig(
        max_num_batched_tokens=options.chunk, prefix_cache=False, compute_threads=options.threads, speculation="none"
    )
    dtype = DTYPES[config.dtype]
    with open_steps(info, config, options.seed) as steps, _progress() as progress:
        work = work_of(steps.engine.model, dtype.itemsize)
        memory, products = Memory(), Products(work, dtype, packed_linear, options.chunk)
        steps.round(1, options.context, 2)  # the first one touches memory for the first time
        task = progress.add_task("rounds", total=rounds)
        done = []
        for _ in range(rounds):
            done.append(_round(options, batches, steps, memory, products))
            progress.advance(task)
    kv_bytes = kv_bytes_read(info.layers, options.context, dtype.itemsize)
    results = _results(options, batches, work, kv_bytes, done)
    return report.Report(
        bench="engine",
        version=importlib.metadata.version("kvferry"),
        machine=this_machine(),
        settings={
            "model": options.model.name,
            "architecture": info.architecture,
            "dtype": config.dtype,
            "compute_threads": options.threads,
            "kernels": _native.available_isas()[0],
            "rounds": rounds,
            "seed": options.seed,
            "sampling": "temperature 1, no filters",
            "torch": str(torch.__version__),
        },
        results=results,
        summary=report.summary_of(results),
    )


def _round(options: Options, batches: Sequence[int], steps: Steps, memory: Memory, products: Products) -> _Round:
    read = max(memory.bytes_per_s() for _ in range(3))
    rates = dict(products.per_s())
    prompt = options.context - STEPS // 2
    decode = {}
    for batch in batches:
        # Prompts are computed in turn: the last one's begin when the first one has drawn some tokens already.
        seen = steps.round(batch, prompt, STEPS + 2 * batch)
        decode[batch] = [one for one in seen if one.num_tokens == one.num_sequences == batch][:STEPS]
    prefill = [one for one in steps.round(1, 4 * options.chunk, 1) if one.num_tokens == options.chunk]
    return _Round(read, rates, decode, prefill)


def _results(
    options: Options, batches: Sequence[int], work: Work, kv_bytes: int, rounds: Sequence[_Round]
) -> report.Results:
    return report.Results(
        limits=report.Limits(
            read_gb_per_s=spread([one.read / 1e9 for one in rounds]),
            gflops={way: spread([2e-9 * one.products[way] for one in rounds]) for way in rounds[0].products},
            weight_bytes=work.bytes_per_step,
            kv_bytes_per_sequence=kv_bytes,
        ),
        decode=[_decode_row(options, batch, work, kv_bytes, rounds) for batch in batches],
        prefill=_prefill_row(options, work, rounds),
    )


def _decode_row(options: Options, batch: int, work: Work, kv_bytes: int, rounds: Sequence[_Round]) -> report.DecodeRow:
    steps = [step for one in rounds for step in one.decode[batch]]
    took = [statistics.median(step.total_s for step in one.decode[batch]) for one in rounds]
    limit = [(work.bytes_per_step + batch * kv_bytes) / one.read for one in rounds]
    compute = [batch * work.products_per_drawn_token / max(one.products.values()) for one in rounds]
    return report.DecodeRow(
        batch=batch,
        context=options.context,
        steps=len(steps),
        step_ms=spread([1e3 * step.total_s for step in steps]),
        schedule_ms=spread([1e3 * step.schedule_s for step in steps]),
        build_ms=spread([1e3 * step.build_s for step in steps]),
        forward_ms=spread([1e3 * step.forward_s for step in steps]),
        sample_ms=spread([1e3 * step.sample_s for step in steps]),
        limit_ms=1e3 * statistics.median(limit),
        compute_limit_ms=1e3 * statistics.median(compute),
        fraction=statistics.median(a / b for a, b in zip(limit, took, strict=True)),
        machine_fraction=statistics.median(max(a, b) / c for a, b, c in zip(limit, compute, took, strict=True)),
    )


def _prefill_row(options: Options, work: Work, rounds: Sequence[_Round]) -> report.PrefillRow:
    steps = [step for one in rounds for step in one.prefill]
    fractions = [
        statistics.median(step.num_tokens / step.total_s for step in one.prefill)
        * work.products_per_token
        / max(one.products.values())
        for one in rounds
    ]
    return report.PrefillRow(
        chunk=options.chunk,
        steps=len(steps),
        tokens_per_s=spread([step.num_tokens / step.total_s for step in steps]),
        fraction=statistics.median(fractions),
    )


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)
