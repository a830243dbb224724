"""A real prefill worker: it computes for whoever asks, and does not leave before its pages were fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from connector import ConnectorConfig, EngineId
from engine import EngineConfig
from prefill import PrefillConfig, PrefillWorker
from rpc.address import WorkerAddress
from rpc.channel import open_channel
from rpc.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.tiny_model import greedy, save_tiny_model

DEADLINE_S = 60.0
CONSUMER = EngineId("decode-0", 1)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def running(model: Path) -> AsyncIterator[tuple[PrefillWorker, WorkerAddress, grpc.aio.Channel]]:
    worker = PrefillWorker(
        PrefillConfig(
            name="prefill-0",
            host="127.0.0.1",
            model_path=str(model),
            engine=EngineConfig(dtype="float32", block_size=4, kv_cache_bytes=1 << 20),
            connector=ConnectorConfig(transport="shm"),
            token="secret",
        )
    )
    try:
        address = await worker.start()
        async with open_channel(address.rpc, "secret") as channel:
            yield worker, address, channel
    finally:
        await worker.stop(0.0)


async def prefill(channel: grpc.aio.Channel, address: WorkerAddress, transfer_id: str) -> prefill_pb2.Prefilled:
    call = prefill_pb2_grpc.PrefillStub(channel).Prefill(
        prefill_pb2.PrefillRequest(
            request_id="r",
            transfer_id=transfer_id,
            consumer=common_pb2.EngineId(name=CONSUMER.name, incarnation=CONSUMER.incarnation),
            producer=common_pb2.EngineId(name=address.name, incarnation=address.incarnation),
            prompt_token_ids=PROMPT,
            sampling=common_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
        ),
        timeout=DEADLINE_S,
    )
    events = [event async for event in call]
    answer: prefill_pb2.Prefilled = events[-1].prefilled
    return answer


async def test_it_draws_the_first_token_and_holds_the_prompt(model: Path) -> None:
    async with running(model) as (worker, address, channel):
        assert worker.phase == "ready"
        answer = await prefill(channel, address, "t")
        assert [answer.first_token_id] == await asyncio.to_thread(greedy, model, PROMPT, 1)
        assert answer.source.num_tokens == len(PROMPT)
        status = worker._core.status()
        assert (status.sources_held, status.blocks_free) == (1, status.blocks_total - 2)
        assert status.counters["prompts_prefilled"] == 1
        assert status.counters["prompt_tokens_computed"] == len(PROMPT)


async def test_a_stop_refuses_new_prompts_and_waits_for_pages_that_nobody_has_fetched_yet(model: Path) -> None:
    async with running(model) as (worker, address, channel):
        await prefill(channel, address, "t")
        stopping = asyncio.create_task(worker.stop(DEADLINE_S))
        while worker.phase != "draining":
            await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError, match="DRAINING") as refused:
            await prefill(channel, address, "another")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        worker._core.connector.sources.ack("t", CONSUMER, 0, 1, "published")
        async with asyncio.timeout(DEADLINE_S):
            await stopping
        assert worker._core.engine.stats().blocks_free == worker._core.engine.num_blocks


async def test_a_stop_whose_grace_is_over_gives_everything_back(model: Path) -> None:
    async with running(model) as (worker, address, channel):
        await prefill(channel, address, "t")
        async with asyncio.timeout(DEADLINE_S):
            await worker.stop(0.0)
        assert worker._core.engine.stats().blocks_free == worker._core.engine.num_blocks
        assert worker._core.engine.memory.fd < 0
