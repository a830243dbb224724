"""When a request reached each stage, for its statistics and its one line in the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum


class Stage(StrEnum):
    """In the order in which a request passes them."""

    RECEIVED = "received"
    PREFILL_SENT = "prefill_sent"
    FIRST_TOKEN = "first_token"
    BLOCKS_RESERVED = "blocks_reserved"
    PAGES_LANDED = "pages_landed"
    SECOND_TOKEN = "second_token"
    ENDED = "ended"


class Stages:
    """Times of one request, in seconds of the given clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[Stage, float] = {}
        self.reach(Stage.RECEIVED)

    def reach(self, stage: Stage) -> None:
        """Note the first time that a stage is reached."""
        self._times.setdefault(stage, self._clock())

    def between(self, earlier: Stage, later: Stage) -> float:
        """Seconds from one stage to another; 0 when either was not reached."""
        if earlier not in self._times or later not in self._times:
            return 0.0
        return self._times[later] - self._times[earlier]

    def tell(self) -> str:
        """All of them, in milliseconds after the first."""
        start = self._times[Stage.RECEIVED]
        return ", ".join(f"{stage} {1000 * (when - start):.1f} ms" for stage, when in self._times.items())
