"""The prefill worker's settings; the defaults live here and nowhere else."""

from __future__ import annotations

from worker import WorkerConfig


class PrefillConfig(WorkerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_queue` bounds the prompts that are waiting or being computed; more are refused, to be sent elsewhere.

    Raises:
        ValueError: it would refuse every prompt.
    """

    max_queue: int = 256

    def __post_init__(self) -> None:
        if self.max_queue < 1:
            raise ValueError(f"prefill.max_queue is {self.max_queue}; it must be at least 1")
