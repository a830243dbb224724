"""Carries a step out: pages made ready, the model run over them, tokens drawn."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from engine.batch import build_batch
from engine.copies import BlockCopier
from engine.groups import CacheGroup
from engine.page_work import BlockCopy
from engine.pool import PagePool
from engine.preparation import prepare
from engine.rows import Row
from engine.runner import forward
from engine.sampler import Drawn, sample
from engine.scheduler import Step
from engine.zeroing.zeroer import Zeroer


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one step took, in seconds, and how much was in it."""

    schedule_s: float
    build_s: float
    forward_s: float
    sample_s: float
    total_s: float
    num_tokens: int
    num_sequences: int


class Result(msgspec.Struct, frozen=True):
    """One drawn token for each of `rows`; None where the logits were not finite. `failed_loads` says by request what
    went wrong: nothing that the step computed for those is of any use."""

    rows: list[Row]
    drawn: list[Drawn | None]
    failed_loads: dict[str, str]
    times: StepTimes


class Executor:
    """See the module. Used by the engine's thread only."""

    def __init__(
        self, model: Any, pool: PagePool, groups: list[CacheGroup], zeroer: Zeroer, copier: BlockCopier
    ) -> None:
        self.model = model
        self._pool = pool
        self._groups = groups
        self._zeroer = zeroer
        self._copier = copier

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy blocks now, between two steps."""
        self._copier.copy(copies)

    def run(self, step: Step, schedule_s: float) -> Result:
        """Compute a step; whatever the model raises comes out."""
        began = time.perf_counter()
        barriers = prepare(step.work, self._zeroer, self._copier, "layerwise")
        before = barriers.before_layer if step.work.loads else None
        batch, rows = build_batch(self._pool, self._groups, step.scheduled, before)
        built = time.perf_counter()
        logits = forward(self.model, batch)
        barriers.finish()
        computed = time.perf_counter()
        drawn = sample(logits, rows)
        ended = time.perf_counter()
        return Result(
            rows=rows,
            drawn=drawn,
            failed_loads=barriers.failed,
            times=StepTimes(
                schedule_s=schedule_s,
                build_s=built - began,
                forward_s=computed - built,
                sample_s=ended - computed,
                total_s=schedule_s + ended - began,
                num_tokens=int(batch.token_ids.shape[1]),
                num_sequences=len(step.scheduled),
            ),
        )
