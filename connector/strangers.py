"""Connections that have not proved the token: few at a time, and few lines of the log.

When there are too many, the one that has been unknown for longest goes. Turning the newest away instead would bound
them as well, but would let a few dozen idle connections keep every real peer out until their deadline; a real one needs
two round trips, after which it is no stranger any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64
QUIET_S = 1.0
"""At most one line of the log in this time is about strangers."""


class Strangers:
    """The tasks that serve them, oldest first. `counters` is its owner's."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._quiet_until = float("-inf")
        self._unsaid = 0

    def came(self, task: asyncio.Task[None]) -> None:
        """One more, served by `task`; the oldest is cancelled if that is one too many."""
        if len(self._tasks) >= MAX_STRANGERS:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
            self._counters["strangers_turned_away"] += 1
        self._tasks[task] = None

    def left(self, task: asyncio.Task[None]) -> None:
        """It has proved itself, or has gone. Leaving twice is harmless."""
        self._tasks.pop(task, None)

    def complain(self, what: str) -> None:
        """Log why one of them was not let in, unless that was done a moment ago: whoever connects must not be able to
        fill a disk."""
        now = asyncio.get_running_loop().time()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more since the last such line)" if self._unsaid else ""
        self._quiet_until, self._unsaid = now + QUIET_S, 0
        logger.warning("not let in: %s%s", what, more)
