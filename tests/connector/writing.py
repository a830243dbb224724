"""A WRITE as its two workers see it: the prefill worker that computes and pushes, the decode worker that receives."""

from __future__ import annotations

import asyncio

import pytest

from connector import (
    DestinationRef,
    Imported,
    ImportFailed,
    ImportOutcome,
    Link,
    Receive,
    SourceEnd,
    new_transfer_id,
)
from tests.connector.pair import Pair, Worker
from tests.connector.pool import BLOCK_SIZE


class Receiving:
    """The decode worker's end: `outcomes` are the calls of `on_settled`, which gives the blocks back unless the pages
    are good."""

    def __init__(self, worker: Worker, link: Link, num_tokens: int = 10, local_blocks: int = 0) -> None:
        self.worker = worker
        self.blocks = self.worker.pool.take(-(-num_tokens // BLOCK_SIZE) - local_blocks)
        self.outcomes: list[ImportOutcome] = []
        self.settled = asyncio.Event()
        self.receive: Receive = self.worker.connector.receive(
            link,
            new_transfer_id(),
            {"full": self.blocks},
            num_tokens,
            self._on_settled,
            local_tokens=local_blocks * BLOCK_SIZE,
        )

    @property
    def destination(self) -> DestinationRef:
        """What the `Prefill` call carries."""
        return self.receive.destination

    def wait(self) -> asyncio.Task[Imported]:
        """Wait for the pages."""
        return asyncio.create_task(self.receive.landed())

    async def failure(self) -> ImportFailed:
        """How it failed; the owner was told exactly once, and the same."""
        with pytest.raises(ImportFailed) as failed:
            await self.receive.landed()
        assert [(outcome.outcome, outcome.reason) for outcome in self.outcomes] == [("failed", failed.value.reason)]
        return failed.value

    def _on_settled(self, outcome: ImportOutcome) -> None:
        self.outcomes.append(outcome)
        if outcome.outcome != "published":
            self.worker.pool.give_back(self.blocks)
        self.settled.set()


class Pushing:
    """The prefill worker's end: its blocks go back when the source ends."""

    def __init__(self, worker: Worker, destination: DestinationRef, seed: int = 1) -> None:
        self.worker = worker
        self.transfer_id = destination.transfer_id
        self.num_tokens = destination.num_tokens
        self.blocks = self.worker.pool.take(-(-destination.num_tokens // BLOCK_SIZE))
        self.worker.pool.fill(self.blocks, seed)
        self.ends: list[SourceEnd] = []
        self.stops: list[str] = []
        self.ended = asyncio.Event()
        try:
            self.worker.connector.sources.open_write(destination, self._on_end, self.stops.append)
        except BaseException:
            self.worker.pool.give_back(self.blocks)
            raise

    def compute(self, num_tokens: int | None = None, layers: tuple[int, ...] = ()) -> None:
        """The forward pass has come this far, in all layers or in these."""
        for layer in layers or tuple(page.layer for page in self.worker.pool.geometry.groups[0].layers):
            self.worker.connector.sources.computed(
                self.transfer_id, {"full": self.blocks}, layer, num_tokens or self.num_tokens
            )

    def finish(self) -> None:
        """The prompt has been computed."""
        self.worker.connector.sources.finish(self.transfer_id)

    def run(self) -> None:
        """All of it at once."""
        self.compute()
        self.finish()

    def _on_end(self, end: SourceEnd) -> None:
        self.ends.append(end)
        self.worker.pool.give_back(self.blocks)
        self.ended.set()


def started(pair: Pair, num_tokens: int = 10, seed: int = 1) -> tuple[Receiving, Pushing]:
    """A WRITE of which nothing has been computed."""
    receiving = Receiving(pair.decode, pair.link, num_tokens)
    return receiving, Pushing(pair.prefill, receiving.destination, seed)
