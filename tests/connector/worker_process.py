"""A worker in a process of its own, told what to do by JSON lines; and the other end of them, for tests.

Reads commands from standard input and answers each on standard output, in their order. Ends when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from connector import ConnectorConfig, DestinationRef, Endpoint, EngineId, ImportFailed, SourceRef
from tests.connector.pair import Held, Reading, Worker
from tests.connector.pool import WIDE, Pool
from tests.connector.writing import Pushing, Receiving

NUM_BLOCKS = 512
PATIENCE_S = 120.0
"""How long a test waits for anything at all; nothing is asserted about time."""


def wide_worker(engine_id: EngineId, config: ConnectorConfig) -> Worker:
    """A worker whose transfers take long enough to be interrupted: 64 KiB a block, 32 MiB a pool."""
    return Worker(engine_id, None, config, pool=Pool(NUM_BLOCKS, WIDE), groups=(WIDE,))


class Commands:
    """What the process can be told."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._held: dict[str, Held] = {}
        self._pushing: dict[str, Pushing] = {}
        self._receiving: list[Receiving] = []

    async def start(self) -> dict[str, Any]:
        """Start the connector."""
        await self._worker.start()
        return {"host": self._worker.endpoint.host, "port": self._worker.endpoint.port}

    async def source(self, transfer_id: str, consumer: tuple[str, int], num_tokens: int, seed: int) -> dict[str, Any]:
        """Open and hold a source."""
        held = Held(self._worker, EngineId(*consumer), transfer_id)
        return dict(msgspec.to_builtins(held.hold(num_tokens, seed)))

    async def write(self, destination: dict[str, Any], seed: int) -> dict[str, Any]:
        """Open a WRITE."""
        ref = msgspec.convert(destination, DestinationRef)
        self._pushing[ref.transfer_id] = Pushing(self._worker, ref, seed)
        return {}

    async def compute(self, transfer_id: str, num_tokens: int) -> dict[str, Any]:
        """The forward pass of a WRITE has come this far; at the prompt's end it is finished."""
        pushing = self._pushing[transfer_id]
        pushing.compute(num_tokens)
        if num_tokens == pushing.num_tokens:
            pushing.finish()
        return {}

    async def receive(self, name: str, num_tokens: int) -> dict[str, Any]:
        """Expect a WRITE of a producer that this worker is connected to."""
        link = self._worker.connector.link(name)
        assert link is not None
        self._receiving.append(Receiving(self._worker, link, num_tokens))
        return dict(msgspec.to_builtins(self._receiving[-1].destination))

    async def connect(self, name: str, incarnation: int, host: str, port: int) -> dict[str, Any]:
        """Connect to a producer."""
        link = await self._worker.connector.connect(EngineId(name, incarnation), Endpoint(host, port))
        return {"transport": link.transport}

    async def begin(self, name: str, transfer_id: str) -> dict[str, Any]:
        """Renew a transfer from now on, and never release it."""
        link = self._worker.connector.link(name)
        assert link is not None
        self._worker.connector.begin(link, transfer_id)
        return {}

    async def stats(self) -> dict[str, Any]:
        """What the worker holds."""
        stats = self._worker.connector.stats()
        return {"free": len(self._worker.pool.free), "held": stats.sources_held, "counters": stats.counters}


async def serve(engine_id: EngineId, config: ConnectorConfig) -> None:
    """Answer commands until the input ends."""
    worker = wide_worker(engine_id, config)
    commands = Commands(worker)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    try:
        while line := await lines.readline():
            command = json.loads(line)
            answer = await getattr(commands, command.pop("do"))(**command)
            print(json.dumps(answer), flush=True)
    finally:
        await worker.connector.close()


class WorkerProcess:
    """The test's end."""

    def __init__(self, process: asyncio.subprocess.Process, engine_id: EngineId) -> None:
        self.engine_id = engine_id
        self.endpoint = Endpoint("", 0)
        self._process = process

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def ask(self, do: str, **arguments: Any) -> Any:
        """One command and its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            line = await self._process.stdout.readline()
        assert line, f"the process of {self.engine_id} has ended instead of answering {do}"
        return json.loads(line)

    async def source(self, transfer_id: str, consumer: EngineId, num_tokens: int, seed: int) -> SourceRef:
        """Let it hold a source."""
        answer = await self.ask(
            "source",
            transfer_id=transfer_id,
            consumer=[consumer.name, consumer.incarnation],
            num_tokens=num_tokens,
            seed=seed,
        )
        return msgspec.convert(answer, SourceRef)

    async def kill(self) -> None:
        """SIGKILL, and reap."""
        self._process.kill()
        await self._process.wait()

    async def end(self) -> int:
        """Close its input and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            return await self._process.wait()


@asynccontextmanager
async def worker_process(engine_id: EngineId, config: ConnectorConfig) -> AsyncIterator[WorkerProcess]:
    """A started worker in another process; it is gone afterwards, whatever happened."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.connector.worker_process",
        json.dumps([engine_id.name, engine_id.incarnation]),
        msgspec.json.encode(config).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    worker = WorkerProcess(process, engine_id)
    try:
        worker.endpoint = Endpoint(**await worker.ask("start"))
        yield worker
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def settled(readings: list[Reading]) -> list[str]:
    """Wait for every reading; their outcomes, each checked to have been told exactly once."""
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*(reading.task for reading in readings), return_exceptions=True)
        await asyncio.gather(*(reading.settled.wait() for reading in readings))
    for result in results:
        assert not isinstance(result, BaseException) or isinstance(result, ImportFailed), result
    assert all(len(reading.outcomes) == 1 for reading in readings)
    return [reading.outcomes[0].reason or reading.outcomes[0].outcome for reading in readings]


if __name__ == "__main__":
    name, incarnation = json.loads(sys.argv[1])
    asyncio.run(serve(EngineId(name, incarnation), msgspec.json.decode(sys.argv[2], type=ConnectorConfig)))
