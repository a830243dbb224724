"""Replies, whole or as server-sent events, and pieces of an answer with the silences between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.types import Send

from gateway.generation import Piece

KEEPALIVE = b": keep-alive\n\n"
EVENT_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
DONE = b"data: [DONE]\n\n"


class Reply:
    """The answer to one request: a whole one, or a stream of events whose status goes out with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.streaming = False

    async def whole(self, status: int, body: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """All of it."""
        data = msgspec.json.encode(body)
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        raw = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()), *extra]
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def event(self, value: Any) -> None:
        """One event with `value` as JSON."""
        await self.write(b"data: " + msgspec.json.encode(value) + b"\n\n")

    async def write(self, data: bytes) -> None:
        """Bytes of a stream, at once."""
        if not self.begun:
            self.begun = self.streaming = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(EVENT_HEADERS)})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """No more events."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_silences(
    pieces: AsyncIterator[Piece], first_s: float, later_s: float
) -> AsyncGenerator[Piece | None, None]:
    """The pieces, and None whenever nothing has come for `first_s` seconds, later for `later_s`."""
    silence_s = first_s
    while True:
        coming = asyncio.ensure_future(anext(pieces))
        try:
            while not (await asyncio.wait({coming}, timeout=silence_s))[0]:
                silence_s = later_s
                yield None
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        try:
            piece = coming.result()
        except StopAsyncIteration:
            return
        silence_s = later_s
        yield piece
