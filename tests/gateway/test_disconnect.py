"""A client that leaves, or takes nothing, or takes too long: its call to the worker is cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import DEADLINE_S, Service, running, until
from tests.gateway.fake_decode import Chunks, Held, chunk

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def connection(service: Service) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare socket, to be closed rudely."""
    url = httpx.URL(service.url)
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps({"model": "tiny", **body}).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


async def test_leaving_before_the_first_token(service: Service) -> None:
    for stream in (False, True):
        service.worker.script = held = Held(0)
        async with connection(service) as (_, writer):
            writer.write(post("/v1/completions", {"prompt": "x", "stream": stream}))
            async with asyncio.timeout(DEADLINE_S):
                await held.called.wait()
        async with asyncio.timeout(DEADLINE_S):
            await held.cancelled.wait()


async def test_leaving_in_the_middle_of_a_stream(service: Service) -> None:
    service.worker.script = held = Held(service.ids("x")[0])
    held.release(2)
    async with connection(service) as (reader, writer):
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        writer.write(post("/v1/chat/completions", body))
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(b'"content":"x"')
    async with asyncio.timeout(DEADLINE_S):
        await held.cancelled.wait()


async def test_leaving_in_the_middle_of_a_whole_answer(service: Service) -> None:
    service.worker.script = held = Held(service.ids("x")[0])
    async with connection(service) as (_, writer):
        writer.write(post("/v1/completions", {"prompt": "x"}))
        async with asyncio.timeout(DEADLINE_S):
            await held.called.wait()
        held.release(3)
    async with asyncio.timeout(DEADLINE_S):
        await held.cancelled.wait()


async def test_leaving_is_counted_and_the_next_request_is_served(service: Service) -> None:
    before = await service.metric("kvferry_client_disconnects_total")
    service.worker.script = held = Held(0)
    async with connection(service) as (_, writer):
        writer.write(post("/v1/completions", {"prompt": "x"}))
        async with asyncio.timeout(DEADLINE_S):
            await held.called.wait()
    async with asyncio.timeout(DEADLINE_S):
        while await service.metric("kvferry_client_disconnects_total") != before + 1:
            await asyncio.sleep(0.005)
    held = Held(0)
    held.release()
    service.worker.script = held
    assert (await service.complete(max_tokens=1)).status_code == 200
    assert await service.metric("kvferry_http_requests_in_flight") == 0


async def test_leaving_while_the_body_is_being_sent(service: Service) -> None:
    async with connection(service) as (_, writer):
        writer.write(post("/v1/completions", {"prompt": "x"})[:-5])
        await writer.drain()
    await asyncio.sleep(0)
    assert not service.worker.requests
    assert (await service.complete(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_before_its_first_token(folder: Path, stream: bool) -> None:
    async with running(folder, request_timeout_s=0.3) as service:
        service.worker.script = held = Held(0)
        response = await service.complete(stream=stream)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        await held.cancelled.wait()


async def test_a_stream_that_takes_too_long(folder: Path) -> None:
    async with running(folder, request_timeout_s=0.3) as service:
        service.worker.script = held = Held(service.ids("x")[0])
        held.release()
        response = await service.complete(stream=True)
        assert response.status_code == 200
        last = [line for line in response.text.splitlines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        await held.cancelled.wait()


async def test_a_client_that_takes_nothing_does_not_hold_the_worker_for_ever(folder: Path) -> None:
    endless = Endless(300)
    async with running(folder, request_timeout_s=1.0, max_model_len=1 << 20) as service:
        service.worker.script = endless
        async with connection(service) as (_, writer):
            # Nothing is read: socket buffers fill, and the answer stands still.
            body = {"prompt": "x", "stream": True, "max_tokens": 100_000, "return_token_ids": True}
            writer.write(post("/v1/completions", body))
            async with asyncio.timeout(DEADLINE_S):
                await endless.cancelled.wait()
            await until(lambda: not service.gateway._in_flight._cuts)


class Endless:
    """Draws as fast as it is read, in large messages."""

    def __init__(self, per_message: int) -> None:
        self._per_message = per_message
        self.cancelled = asyncio.Event()

    async def __call__(self, request: Any) -> Chunks:
        try:
            while True:
                yield chunk(*[10] * self._per_message)
        finally:
            self.cancelled.set()
