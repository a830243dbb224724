"""When an answer's tokens came."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from gateway.generation import Piece
from gateway.metrics import Metrics


class Timing:
    """One request, from the moment this is made."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.perf_counter) -> None:
        self._metrics = metrics
        self._clock = clock
        self._start = clock()

    async def watching(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
        """The same pieces; what they tell is counted as they pass."""
        first = last = 0.0
        tokens = 0
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    last = self._clock()
                    if not tokens:
                        first = last
                        self._metrics.ttft.observe(first - self._start)
                    tokens += len(piece.token_ids)
                    self._metrics.output_tokens.inc(len(piece.token_ids))
                    yield piece
        finally:
            self._metrics.e2e.observe(self._clock() - self._start)
            if tokens > 1:
                self._metrics.tpot.observe((last - first) / (tokens - 1))
