"""The prefill worker's settings; the defaults live here and nowhere else."""

from __future__ import annotations

from worker import WorkerConfig


class PrefillConfig(WorkerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_queue` bounds the prompts that are waiting or being computed; more are refused, to be sent elsewhere."""

    max_queue: int = 256
