"""Blocks for pages to come, first come, first served.

The engine answers at once whether it has blocks. Those who have to wait stand in one queue, which is looked at whenever
blocks have come back: nobody polls, and a small request never overtakes a large one for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

import msgspec

from engine import BlockTable


class Blocks(Protocol):
    """What this needs of the engine."""

    def reserve(self, owner: str, num_tokens: int) -> BlockTable | None:
        """Blocks, or None when there are none now."""

    def free(self, table: BlockTable) -> None:
        """Give blocks back."""


class _Waiter(msgspec.Struct, eq=False):
    owner: str
    num_tokens: int
    table: asyncio.Future[BlockTable]


class Reservations:
    """See the module. Lives on one event loop; `blocks_freed` may be called on any thread."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._loop = asyncio.get_running_loop()
        self._waiters: deque[_Waiter] = deque()

    async def reserve(self, owner: str, num_tokens: int, timeout_s: float) -> BlockTable:
        """Blocks for `num_tokens` tokens; the caller owns them.

        Raises:
            TimeoutError: there were none for `timeout_s`.
        """
        waiter = _Waiter(owner, num_tokens, self._loop.create_future())
        self._waiters.append(waiter)
        self._serve()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(waiter.table)
        except BaseException:
            if waiter.table.done():  # it came in the moment in which nobody wanted it any more
                self._blocks.free(waiter.table.result())
            else:
                self._waiters.remove(waiter)
                waiter.table.cancel()
            self._serve()
            raise

    def blocks_freed(self) -> None:
        """Blocks have come back, or may be reserved again."""
        self._loop.call_soon_threadsafe(self._serve)

    def _serve(self) -> None:
        while self._waiters:
            first = self._waiters[0]
            table = self._blocks.reserve(first.owner, first.num_tokens)
            if table is None:
                return
            self._waiters.popleft()
            first.table.set_result(table)
