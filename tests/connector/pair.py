"""A prefill and a decode worker's connectors in one process, over the scripted fabric."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from connector import (
    Connector,
    ConnectorConfig,
    Endpoint,
    EngineId,
    Imported,
    ImportFailed,
    ImportOutcome,
    Link,
    Pull,
    SourceEnd,
    SourceRef,
    new_transfer_id,
)
from tests.connector.cable import Cable
from tests.connector.fabric import Fabric
from tests.connector.pool import BLOCK_SIZE, TOKEN, D, P, Pool, compatibility


class Worker:
    """A pool and its connector, over the fabric if there is one, else over real transports."""

    def __init__(
        self,
        engine_id: EngineId,
        fabric: Fabric | None,
        config: ConnectorConfig | None = None,
        *,
        token: bytes = TOKEN,
        pool: Pool | None = None,
        **changes: object,
    ) -> None:
        self.engine_id = engine_id
        self.pool = pool or Pool()
        self.end = str(engine_id)
        self.connector = Connector(
            config or ConnectorConfig(),
            engine_id,
            self.pool.memory,
            self.pool.geometry,
            compatibility(**changes),
            token,
            clock=asyncio.get_running_loop().time,
            transports={"fabric": lambda: fabric.transport(self.end, self.pool.custody)} if fabric else None,
        )
        self.endpoint = Endpoint("127.0.0.1", 0)

    async def start(self) -> None:
        """Start the connector."""
        self.endpoint = await self.connector.start()

    def count(self, counter: str) -> int:
        """One counter of the connector."""
        return self.connector.stats().counters.get(counter, 0)


class Held:
    """A source as its prefill worker sees it: the blocks go back when it ends."""

    def __init__(self, worker: Worker, consumer: EngineId, transfer_id: str) -> None:
        self.worker = worker
        self.transfer_id = transfer_id
        self.blocks: list[int] = []
        self.ends: list[SourceEnd] = []
        self.ended = asyncio.Event()
        worker.connector.sources.open(transfer_id, consumer, self._end)

    def hold(self, num_tokens: int, seed: int) -> SourceRef:
        """The prompt has been computed."""
        self.blocks = self.worker.pool.take(-(-num_tokens // BLOCK_SIZE))
        self.worker.pool.fill(self.blocks, seed)
        return self.worker.connector.sources.hold(self.transfer_id, {"full": self.blocks}, num_tokens)

    def _end(self, end: SourceEnd) -> None:
        self.ends.append(end)
        self.worker.pool.give_back(self.blocks)
        self.ended.set()


class Reading:
    """A read as its decode worker sees it: `outcomes` are the calls of `on_settled`, which gives the blocks back."""

    def __init__(self, worker: Worker, pull: Pull, source: SourceRef, num_blocks: int | None = None) -> None:
        self.worker = worker
        self.blocks = worker.pool.take(num_blocks or len(source.blocks["full"]))
        self.outcomes: list[ImportOutcome] = []
        self.settled = asyncio.Event()
        self.task: asyncio.Task[Imported] = asyncio.create_task(
            pull.read(source, {"full": self.blocks}, self._on_settled)
        )

    async def failure(self) -> ImportFailed:
        """How it failed; the caller was told exactly once, and the same."""
        with pytest.raises(ImportFailed) as failed:
            await self.task
        assert [(outcome.outcome, outcome.reason) for outcome in self.outcomes] == [("failed", failed.value.reason)]
        return failed.value

    def _on_settled(self, outcome: ImportOutcome) -> None:
        self.outcomes.append(outcome)
        if outcome.outcome != "published":
            self.worker.pool.give_back(self.blocks)
        self.settled.set()


class Pair:
    """Two workers, connected through a cable."""

    def __init__(self, fabric: Fabric, prefill: Worker, decode: Worker, cable: Cable, link: Link) -> None:
        self.fabric = fabric
        self.prefill = prefill
        self.decode = decode
        self.cable = cable
        self.link = link

    def all_free(self) -> bool:
        """Whether both pools are as they were."""
        return all(len(worker.pool.free) == 16 for worker in (self.prefill, self.decode))

    def source(self, num_tokens: int = 10, seed: int = 1) -> tuple[Held, Pull, SourceRef]:
        """A transfer whose prompt has been computed."""
        pull = self.decode.connector.begin(self.link, new_transfer_id())
        held = Held(self.prefill, self.decode.engine_id, pull.transfer_id)
        return held, pull, held.hold(num_tokens, seed)


@asynccontextmanager
async def connected(
    *,
    automatic: bool = True,
    config: ConnectorConfig | None = None,
    prefill_config: ConnectorConfig | None = None,
) -> AsyncIterator[Pair]:
    """Two workers with a link between them; closes both, and checks that nothing wrote where it must not."""
    fabric = Fabric(automatic)
    prefill, decode = Worker(P, fabric, prefill_config or config), Worker(D, fabric, config)
    await prefill.start()
    await decode.start()
    cable = Cable(prefill.endpoint)
    await cable.start()
    try:
        link = await decode.connector.connect(prefill.engine_id, cable.endpoint)
        yield Pair(fabric, prefill, decode, cable, link)
    finally:
        await decode.connector.close()
        await prefill.connector.close()
        await cable.close()
    assert decode.pool.custody.violations == []
    assert decode.connector.failure is None
    assert prefill.connector.failure is None
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, f"tasks were left behind: {others}"
