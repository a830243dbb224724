"""The requests being answered, and how they end when the gateway stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import ApiError, unavailable

CUT_S = 5.0
"""How long an answer may take to end once it has been told to."""


class InFlight:
    """Every request `enter`s; `drain` lets nobody in any more and waits for those inside."""

    def __init__(self) -> None:
        self._cuts: set[asyncio.Future[ApiError]] = set()
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self) -> Iterator[asyncio.Future[ApiError]]:
        """One request; the future is set when it has to end, to what its client is told.

        Raises:
            ApiError: 503, when the gateway is stopping.
        """
        if self._draining:
            raise unavailable("the gateway is stopping")
        cut: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._cuts.add(cut)
        self._empty.clear()
        try:
            yield cut
        finally:
            self._cuts.discard(cut)
            if not self._cuts:
                self._empty.set()

    async def drain(self, grace_s: float) -> None:
        """Let running requests end within `grace_s`, then end the rest."""
        self._draining = True
        if await self._emptied(grace_s):
            return
        for cut in self._cuts:
            if not cut.done():
                cut.set_result(unavailable("the gateway is stopping"))
        await self._emptied(CUT_S)

    async def _emptied(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
