"""The `Prefill` service over real gRPC and real sources: what it refuses, and that no call leaves blocks behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from connector import ConnectorConfig, Sources
from engine import EngineClosed, EngineConfig, EngineError, RequestTooLong
from prefill.config import PrefillConfig
from prefill.service import NAME, PrefillService
from rpc.channel import open_channel
from rpc.errors import CallRefused
from rpc.server import RpcServer
from rpc.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.prefill.scripted import CONSUMER, PRODUCER, PROMPT, FakeEngine
from worker.core import as_message

DEADLINE_S = 20.0


def config(**changed: Any) -> PrefillConfig:
    return PrefillConfig(
        name="prefill-0",
        host="",
        model_path="",
        engine=EngineConfig(),
        connector=ConnectorConfig(),
        token="secret",
        **changed,
    )


def message(transfer_id: str = "t", **changed: Any) -> prefill_pb2.PrefillRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "transfer_id": transfer_id,
        "consumer": as_message(CONSUMER),
        "producer": as_message(PRODUCER),
        "prompt_token_ids": PROMPT,
        "sampling": common_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
    }
    return prefill_pb2.PrefillRequest(**(fields | changed))


class Serving:
    """A server with that one service, and a channel to it."""

    def __init__(self, **changed: Any) -> None:
        self.engine = FakeEngine()
        self.sources = Sources(PRODUCER, self.engine.geometry, 30.0, lambda: 0.0)
        self.core: Any = SimpleNamespace(
            engine=self.engine,
            engine_id=PRODUCER,
            counters=Counter(),
            info=SimpleNamespace(vocab_size=50),
            require_ready=lambda: None,
            connector=SimpleNamespace(sources=self.sources),
        )
        self.server = RpcServer("127.0.0.1", 0, "secret")
        prefill_pb2_grpc.add_PrefillServicer_to_server(
            PrefillService(cast(Any, self.core), config(**changed)), self.server.server
        )
        self.channel: grpc.aio.Channel

    async def __aenter__(self) -> Serving:
        self.channel = open_channel(await self.server.start([NAME]), "secret")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close(None)
        await self.server.stop(0.0)

    def call(self, request: prefill_pb2.PrefillRequest) -> Any:
        return prefill_pb2_grpc.PrefillStub(self.channel).Prefill(request, timeout=DEADLINE_S)

    async def events(self, request: prefill_pb2.PrefillRequest) -> list[prefill_pb2.PrefillEvent]:
        call = self.call(request)
        try:
            return [event async for event in call]
        finally:
            call.cancel()

    async def refused(self, request: prefill_pb2.PrefillRequest) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.events(request)
        return error.value.code(), str(error.value.details())

    async def begun(self, transfer_id: str = "t") -> asyncio.Task[list[prefill_pb2.PrefillEvent]]:
        """A call whose prompt is being computed."""
        task = asyncio.create_task(self.events(message(transfer_id)))
        await until(lambda: transfer_id in self.engine.submitted)
        return task

    def check_nothing_is_left(self) -> None:
        self.engine.blocks.validate()
        assert self.engine.submitted == {}
        assert (self.sources.active, self.engine.blocks.num_free) == (0, 4)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_a_prompt_is_accepted_and_then_held_until_the_ack() -> None:
    async with Serving() as serving:
        task = await serving.begun()
        serving.engine.finish("t")
        accepted, last = await task
        assert accepted.WhichOneof("event") == "accepted"
        assert last.prefilled.first_token_id == 9
        source = last.prefilled.source
        assert (source.transfer_id, source.num_tokens) == ("t", 3)
        assert {group.group: list(group.block_ids) for group in source.groups} == {"full": [0, 1]}
        assert (source.producer.name, source.producer.incarnation) == (PRODUCER.name, PRODUCER.incarnation)
        assert (serving.sources.held, serving.engine.blocks.num_free) == (1, 2)
        serving.sources.ack("t", CONSUMER, 0, 1, "published")
        serving.check_nothing_is_left()
        assert serving.core.counters == {"prompts_prefilled": 1}


async def test_the_lease_can_be_renewed_as_soon_as_the_call_is_accepted() -> None:
    async with Serving() as serving:
        accepted = asyncio.Event()

        async def read() -> None:
            async for event in serving.call(message()):
                if event.WhichOneof("event") == "accepted":
                    accepted.set()

        task = asyncio.create_task(read())
        async with asyncio.timeout(DEADLINE_S):
            await accepted.wait()
        assert serving.sources.renew("t", CONSUMER) == "renewed"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: serving.sources.active == 0)


async def test_another_incarnation_is_refused_with_both() -> None:
    async with Serving() as serving:
        other = common_pb2.EngineId(name="prefill-0", incarnation=77)
        code, details = await serving.refused(message(producer=other))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert str(PRODUCER) in details
        assert f"{77:016x}" in details
        serving.check_nothing_is_left()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"prompt_token_ids": []}, "at least one token"),
        ({"prompt_token_ids": [50]}, "token 50"),
        ({"prompt_token_ids": [1] * 8}, "8 tokens"),
        ({"transfer_id": ""}, "transfer_id is empty"),
        ({"sampling": common_pb2.SamplingParams()}, "sampling.top_p"),
    ],
)
async def test_what_can_never_be_computed_is_refused(changed: dict[str, Any], says: str) -> None:
    async with Serving() as serving:
        code, details = await serving.refused(message(**changed))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert says in details
        serving.check_nothing_is_left()
        assert serving.core.counters == {"prompts_invalid_argument": 1}


async def test_a_worker_that_is_not_ready_takes_no_prompt() -> None:
    async with Serving() as serving:

        def refuse() -> None:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, "it is DRAINING")

        serving.core.require_ready = refuse
        assert await serving.refused(message()) == (grpc.StatusCode.UNAVAILABLE, "it is DRAINING")


async def test_a_full_queue_refuses_and_the_next_is_taken_when_there_is_room() -> None:
    async with Serving(max_queue=1) as serving:
        first = await serving.begun("first")
        code, details = await serving.refused(message("second"))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "prefill.max_queue" in details
        serving.engine.finish("first")
        await first
        third = await serving.begun("third")  # what is held does not stand in the queue
        serving.engine.finish("third")
        await third
        assert serving.sources.held == 2


async def test_a_transfer_is_computed_once_and_one_that_was_given_up_not_at_all() -> None:
    async with Serving() as serving:
        task = await serving.begun()
        code, _ = await serving.refused(message())
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "t" in serving.engine.submitted, "the first one goes on"
        serving.engine.finish("t")
        await task
        serving.sources.ack("t", CONSUMER, 0, 1, "published")
        assert (await serving.refused(message()))[0] is grpc.StatusCode.FAILED_PRECONDITION
        serving.sources.ack("early", CONSUMER, 0, 1, "the client left")
        assert (await serving.refused(message("early")))[0] is grpc.StatusCode.FAILED_PRECONDITION
        serving.check_nothing_is_left()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineClosed("it closes"), grpc.StatusCode.UNAVAILABLE),
        (RequestTooLong(3, 1, 2), grpc.StatusCode.INVALID_ARGUMENT),
        (EngineError("it is wrong"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_the_engine_refuses_ends_the_source(error: EngineError, code: grpc.StatusCode) -> None:
    async with Serving() as serving:
        serving.engine.refuses = error
        assert await serving.refused(message()) == (code, str(error))
        serving.check_nothing_is_left()


async def test_a_failed_step_is_a_failed_leg() -> None:
    async with Serving() as serving:
        task = await serving.begun()
        serving.engine.fail("t")
        with pytest.raises(grpc.aio.AioRpcError, match="a step failed") as error:
            await task
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        serving.check_nothing_is_left()
        assert serving.core.counters == {"prompts_unavailable": 1}


async def test_a_mistake_of_the_worker_ends_the_source_and_is_counted_as_one() -> None:
    async with Serving() as serving:

        def wrong(request: object) -> None:
            raise ZeroDivisionError("oh")

        serving.engine.submit = wrong  # type: ignore[method-assign]
        code, details = await serving.refused(message())
        assert code is grpc.StatusCode.INTERNAL
        assert "ZeroDivisionError" in details
        serving.check_nothing_is_left()
        assert serving.core.counters == {"prompts_internal": 1}


async def test_a_cancelled_call_stops_the_computation() -> None:
    async with Serving() as serving:
        task = await serving.begun()
        task.cancel()
        await until(lambda: serving.engine.calls["abort"] == 1)
        serving.check_nothing_is_left()
        await until(lambda: serving.core.counters == {"prompts_cancelled": 1})


async def test_a_call_cancelled_after_the_last_step_leaves_nothing() -> None:
    """Whichever the service hears of first, the blocks come back: by the call's end, or by the consumer's ACK."""
    for turns in range(12):
        async with Serving() as serving:
            task = await serving.begun()
            task.cancel()
            for _ in range(turns):
                await asyncio.sleep(0)
            if "t" in serving.engine.submitted:
                serving.engine.finish("t")
            await until(lambda: serving.core.counters.total() == 1)
            serving.sources.ack("t", CONSUMER, 0, 1, "the client left")
            serving.check_nothing_is_left()


async def test_a_source_that_ends_while_it_is_computed_ends_the_call_and_is_no_fault() -> None:
    """The ACK of a consumer that leaves may come before the end of its call."""
    async with Serving() as serving:
        task = await serving.begun()
        serving.sources.ack("t", CONSUMER, 0, 1, "the client left")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await task
        assert error.value.code() is grpc.StatusCode.CANCELLED
        serving.check_nothing_is_left()
        assert serving.core.counters == {"prompts_cancelled": 1}


def test_a_queue_that_would_refuse_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prefill\.max_queue is 0"):
        config(max_queue=0)
