"""How a prompt's pages come from the prefill worker to this one: read afterwards, or written while it computes.

Either way the pages land in blocks that belong to the import until it has settled, and to the request only if it still
wants them then (see `decode.landing`). `begin` comes before the prefill call, `pages` after its first token, and
`release` at the end of every request, whatever has happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from typing import Protocol

import grpc

from connector import (
    Connector,
    ConnectorError,
    DestinationRef,
    Imported,
    ImportFailed,
    ImportOutcome,
    InvalidTransition,
    Link,
    Pull,
    Receive,
    SourceRef,
)
from decode.landing import Landing
from decode.reservations import Reservations
from decode.stages import Stage, Stages
from engine import BlockTable, Engine
from rpc.errors import CallRefused


class Blocks:
    """Where a request's blocks come from. `counters` are told how transfers end, `stages` when blocks were had."""

    def __init__(
        self,
        engine: Engine,
        reservations: Reservations,
        reserve_timeout_s: float,
        counters: Counter[str],
        stages: Stages,
    ) -> None:
        self.engine = engine
        self._stages = stages
        self._reservations = reservations
        self._timeout_s = reserve_timeout_s
        self._counters = counters

    async def reserve(self, transfer_id: str, num_tokens: int) -> BlockTable:
        """Blocks for a prompt.

        Raises:
            CallRefused: there were none in time.
        """
        try:
            table = await self._reservations.reserve(transfer_id, num_tokens, self._timeout_s)
        except TimeoutError as error:
            raise CallRefused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"no free blocks for {num_tokens} tokens within {self._timeout_s:g} s; try again later",
            ) from error
        self._stages.reach(Stage.BLOCKS_RESERVED)
        return table

    def count(self, outcome: ImportOutcome) -> None:
        """An import has settled."""
        self._counters[f"transfers_{outcome.outcome}"] += 1
        if outcome.outcome == "failed":
            self._counters[f"transfers_failed_{outcome.reason.lower()}"] += 1


class Handoff(Protocol):
    """See the module."""

    async def begin(self) -> DestinationRef | None:
        """Before the prefill call; returns what it has to carry. Raises `CallRefused`."""

    async def pages(self, source: SourceRef | None) -> tuple[BlockTable, Imported]:
        """The prompt's pages, in blocks of the request's own. Raises `CallRefused`."""

    def release(self) -> Awaitable[None]:
        """The request is over, or has its pages: let the prefill worker go. To be awaited in the background."""


class ReadHandoff:
    """The pages are read after they have been computed; blocks are taken late.

    Raises:
        ConnectorError: the prefill worker is gone.
    """

    def __init__(self, connector: Connector, link: Link, transfer_id: str, num_tokens: int, blocks: Blocks) -> None:
        self._pull: Pull = connector.begin(link, transfer_id)
        self._num_tokens = num_tokens
        self._blocks = blocks

    async def begin(self) -> DestinationRef | None:
        """See `Handoff`."""
        return None

    async def pages(self, source: SourceRef | None) -> tuple[BlockTable, Imported]:
        """See `Handoff`."""
        if source is None or source.num_tokens != self._num_tokens:
            held = "nothing" if source is None else f"{source.num_tokens} tokens"
            raise CallRefused(
                grpc.StatusCode.UNAVAILABLE,
                f"prefill holds {held} of a prompt of {self._num_tokens}; its answer is not used",
            )
        table = await self._blocks.reserve(self._pull.transfer_id, self._num_tokens)
        landing = Landing(table, self._blocks.engine.free)

        def settled(outcome: ImportOutcome) -> None:
            self._blocks.count(outcome)
            landing.on_settled(outcome)

        try:
            imported = await self._pull.read(source, table.by_group(), settled)
        except ImportFailed as error:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, f"the pages did not arrive: {error}") from error
        except InvalidTransition as error:  # a mistake of ours: nothing was posted, and nobody will settle it
            self._blocks.engine.free(table)
            raise CallRefused(grpc.StatusCode.INTERNAL, f"the pages could not be asked for: {error}") from error
        except BaseException:
            landing.abandon()
            raise
        return landing.take(), imported

    def release(self) -> Awaitable[None]:
        """See `Handoff`. Nothing to do after a read that has settled."""
        return self._pull.release("the request is over")


class WriteHandoff:
    """The pages are written while they are computed, into blocks that are taken first."""

    def __init__(self, connector: Connector, link: Link, transfer_id: str, num_tokens: int, blocks: Blocks) -> None:
        self._connector = connector
        self._link = link
        self._transfer_id = transfer_id
        self._num_tokens = num_tokens
        self._blocks = blocks
        self._receive: Receive | None = None
        self._landing: Landing | None = None
        self._taken = False

    async def begin(self) -> DestinationRef | None:
        """See `Handoff`."""
        table = await self._blocks.reserve(self._transfer_id, self._num_tokens)
        landing = self._landing = Landing(table, self._blocks.engine.free)

        def settled(outcome: ImportOutcome) -> None:
            self._blocks.count(outcome)
            landing.on_settled(outcome)

        try:
            self._receive = self._connector.receive(
                self._link, self._transfer_id, table.by_group(), self._num_tokens, settled
            )
        except ConnectorError as error:
            self._blocks.engine.free(table)
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        return self._receive.destination

    async def pages(self, source: SourceRef | None) -> tuple[BlockTable, Imported]:
        """See `Handoff`."""
        assert self._receive is not None
        assert self._landing is not None
        try:
            imported = await self._receive.landed()
        except ImportFailed as error:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, f"the pages did not arrive: {error}") from error
        self._taken = True
        return self._landing.take(), imported

    async def release(self) -> None:
        """See `Handoff`. Blocks that the prefill worker may still write stay the import's."""
        if self._receive is None or self._taken:
            return
        assert self._landing is not None
        self._landing.abandon()
        self._receive.cancel()
