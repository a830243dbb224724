"""A decode worker in this process and prefill workers in their own, on the tiny model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec

from connector import ConnectorConfig
from decode import DecodeConfig, DecodeWorker
from engine import EngineConfig
from rpc.address import WorkerAddress
from rpc.channel import open_channel
from rpc.v1 import common_pb2, generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.tiny_model import VOCAB_SIZE

DEADLINE_S = 60.0
ENGINE: dict[str, Any] = {"dtype": "float32", "block_size": 4, "kv_cache_bytes": 4 << 20, "max_num_batched_tokens": 24}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


class PrefillProcess:
    """One prefill worker."""

    def __init__(self, model: Path, connector: dict[str, Any], name: str = "prefill-0", **changed: Any) -> None:
        settings = {"engine": ENGINE, "connector": connector} | changed
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.decode.prefill_process", name, str(model), msgspec.json.encode(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        self.address: WorkerAddress

    async def started(self) -> WorkerAddress:
        """Where it answers."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            line = await asyncio.to_thread(self.process.stdout.readline)
        self.address = msgspec.json.decode(line, type=WorkerAddress)
        return self.address

    async def stop(self) -> int:
        """Let it end by itself; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)

    def kill(self) -> None:
        """SIGKILL, if it still runs; its pipes are closed."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Pool:
    """The decode worker and a channel to it."""

    def __init__(self, model: Path, connector: dict[str, Any], **changed: Any) -> None:
        self.worker = DecodeWorker(
            DecodeConfig(
                name="decode-0",
                host="127.0.0.1",
                model_path=str(model),
                engine=msgspec.convert(ENGINE, EngineConfig),
                connector=msgspec.convert(connector, ConnectorConfig),
                token="secret",
                **changed,
            )
        )
        self.channel: grpc.aio.Channel

    async def start(self) -> None:
        """Start the worker and open the channel."""
        address = await self.worker.start()
        self.channel = open_channel(address.rpc, "secret")

    async def stop(self) -> None:
        """Close both."""
        await self.channel.close(None)
        await self.worker.stop(5.0)

    async def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        leave_after: int | None = None,
        sampling: dict[str, Any] | None = None,
        on_token: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], generate_pb2.RequestStats]:
        """One request to its end, or until `leave_after` tokens have come."""
        params = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0} | (sampling or {})
        call = generate_pb2_grpc.GenerateStub(self.channel).Generate(
            generate_pb2.GenerateRequest(
                request_id=f"request of {len(prompt)}",
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                stop_token_ids=[2],
                sampling=common_pb2.SamplingParams(**params),
            ),
            timeout=DEADLINE_S,
        )
        tokens: list[int] = []
        stats = generate_pb2.RequestStats()
        try:
            async for chunk in call:
                assert chunk.token_ids
                tokens += chunk.token_ids
                on_token()
                stats = chunk.stats
                if leave_after is not None and len(tokens) >= leave_after:
                    break
        finally:
            call.cancel()
        return tokens, stats

    async def status(self) -> worker_pb2.WorkerStatus:
        """The decode worker's."""
        status: worker_pb2.WorkerStatus = await worker_pb2_grpc.WorkerStub(self.channel).Status(
            worker_pb2.StatusRequest(), timeout=DEADLINE_S
        )
        return status


async def status_of(address: WorkerAddress) -> worker_pb2.WorkerStatus:
    """A worker's own account of itself."""
    async with open_channel(address.rpc, "secret") as channel:
        status: worker_pb2.WorkerStatus = await worker_pb2_grpc.WorkerStub(channel).Status(
            worker_pb2.StatusRequest(), timeout=DEADLINE_S
        )
        return status


def is_idle(status: worker_pb2.WorkerStatus) -> bool:
    """Whether everything has come back."""
    busy = status.sources_held + status.imports_active + status.requests_running + status.requests_waiting
    return busy == 0 and status.blocks_free == status.blocks_total


async def until_idle(*of: Any) -> None:
    """Wait until each of `of` (functions that return a status) is idle."""
    async with asyncio.timeout(DEADLINE_S):
        while not all([is_idle(await status()) for status in of]):
            await asyncio.sleep(0.02)


def prompts(count: int) -> list[list[int]]:
    """Prompts of lengths around the borders of blocks (4 tokens) and chunks (24), none with a stop token in it."""
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 23, 24, 25, 47, 48, 49, 60, 96]
    return [
        [3 + (7 * place + 13 * index) % (VOCAB_SIZE - 3) for place in range(lengths[index % len(lengths)])]
        for index in range(count)
    ]
