"""The `Generate` service over real gRPC, in scripted surroundings: every call ends with a status that fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

import grpc
import pytest

from decode.service import NAME, GenerateService
from rpc.channel import open_channel
from rpc.errors import CallRefused
from rpc.server import RpcServer
from rpc.v1 import generate_pb2, generate_pb2_grpc
from tests.decode.scripted import DEADLINE_S, FIRST, PROMPT, Made, message


class Serving:
    """A server with that one service, and a channel to it."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.service = GenerateService(made.core, made.config, made.peers, made.reservations)
        self.server = RpcServer("127.0.0.1", 0, "secret")
        self.channel: grpc.aio.Channel

    async def __aenter__(self) -> Serving:
        generate_pb2_grpc.add_GenerateServicer_to_server(self.service, self.server.server)
        self.channel = open_channel(await self.server.start([NAME]), "secret")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close(None)
        await self.server.stop(0.0)
        async with asyncio.timeout(DEADLINE_S):
            await self.service.close()

    def call(self, request: generate_pb2.GenerateRequest | None = None) -> AsyncIterable[generate_pb2.GenerateChunk]:
        call: AsyncIterable[generate_pb2.GenerateChunk] = generate_pb2_grpc.GenerateStub(self.channel).Generate(
            request or message(), timeout=DEADLINE_S
        )
        return call

    async def tokens(self, request: generate_pb2.GenerateRequest | None = None) -> list[int]:
        return [token async for chunk in self.call(request) for token in chunk.token_ids]

    async def refused(self, request: generate_pb2.GenerateRequest | None = None) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.tokens(request)
        return error.value.code(), str(error.value.details())

    @property
    def outcomes(self) -> dict[str, int]:
        """Requests by outcome."""
        return {name: count for name, count in self.made.core.counters.items() if name.startswith("requests_")}


def hanging() -> Made:
    made = Made()
    made.answers, made.hangs = False, True
    return made


async def test_an_answer_ends_with_its_last_token() -> None:
    async with Serving(Made()) as serving:
        assert await serving.tokens() == [FIRST, 11, 12]
        assert serving.outcomes == {"requests_finished": 1}
        assert await serving.service.drained(DEADLINE_S)


async def test_what_can_never_be_served_is_refused_with_both_numbers() -> None:
    async with Serving(Made()) as serving:
        code, details = await serving.refused(message(max_tokens=6))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"the prompt has {len(PROMPT)} tokens" in details
        assert "at most 8" in details
        assert (await serving.refused(generate_pb2.GenerateRequest()))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert serving.made.call is None, "prefill was asked"


async def test_more_requests_than_allowed_are_refused() -> None:
    made = hanging()
    made.config = Made(max_requests=1).config
    async with Serving(made) as serving:
        first = asyncio.create_task(serving.tokens())
        async with asyncio.timeout(DEADLINE_S):
            while made.call is None:
                await asyncio.sleep(0)
        assert not await serving.service.drained(0.0)
        code, details = await serving.refused()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "decode.max_requests" in details
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await serving.service.drained(DEADLINE_S)
        assert serving.outcomes == {"requests_resource_exhausted": 1, "requests_cancelled": 1}


async def test_a_worker_that_is_not_ready_serves_nothing() -> None:
    made = Made()

    def refuse() -> None:
        raise CallRefused(grpc.StatusCode.UNAVAILABLE, "decode-0 is DRAINING; use another worker")

    made.core.require_ready = refuse
    async with Serving(made) as serving:
        assert await serving.refused() == (grpc.StatusCode.UNAVAILABLE, "decode-0 is DRAINING; use another worker")
        assert made.call is None


async def test_a_request_has_a_deadline_of_its_own() -> None:
    made = hanging()
    made.config = Made(request_timeout_s=1e-6).config
    async with Serving(made) as serving:
        code, details = await serving.refused()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "decode.request_timeout_s" in details
        assert serving.outcomes == {"requests_deadline_exceeded": 1}


async def test_a_leg_that_fails_after_the_first_token_is_an_error_and_no_end() -> None:
    made = Made()
    made.engine.script, made.engine.fails = [(11, None)], True
    async with Serving(made) as serving:
        got: list[int] = []

        async def read() -> None:
            async for chunk in serving.call():
                got.extend(chunk.token_ids)

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read()
        assert got[0] == FIRST
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_mistake_of_the_worker_is_an_error_and_counted_as_one() -> None:
    made = Made()

    def wrong() -> None:
        raise ZeroDivisionError("oh")

    made.peers.pick = wrong
    async with Serving(made) as serving:
        code, details = await serving.refused()
        assert code is grpc.StatusCode.INTERNAL
        assert "ZeroDivisionError" in details
        assert serving.outcomes == {"requests_internal": 1}


async def test_a_peer_that_is_dropped_under_a_request_ends_it_with_a_status() -> None:
    made = Made()
    made.answers, made.error = False, asyncio.CancelledError()
    async with Serving(made) as serving:
        code, _ = await serving.refused()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert serving.outcomes == {"requests_unavailable": 1}


async def test_closing_waits_for_what_is_being_released() -> None:
    made = Made(max_tokens=1)
    confirmed, releasing = asyncio.Event(), asyncio.Event()

    async def release(outcome: str) -> None:
        releasing.set()
        await confirmed.wait()

    made.pull.release = release  # type: ignore[method-assign]
    async with Serving(made) as serving:
        assert await serving.tokens(message(max_tokens=1)) == [FIRST]
        async with asyncio.timeout(DEADLINE_S):
            await releasing.wait()
        closing = asyncio.create_task(serving.service.close())
        await asyncio.sleep(0)
        assert not closing.done()
        confirmed.set()
        async with asyncio.timeout(DEADLINE_S):
            await closing


@pytest.mark.parametrize("name", ["max_requests", "prefill_timeout_s", "request_timeout_s"])
def test_settings_that_would_refuse_everything_are_refused(name: str) -> None:
    nothing: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"decode.{name} is 0"):
        Made(**nothing)
    with pytest.raises(ValueError, match="reserve_timeout_s is -1"):
        Made(reserve_timeout_s=-1)
