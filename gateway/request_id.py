"""One id for every HTTP request: the client's, made harmless, or a new one. It goes back with the answer, and on to the
workers as the beginning of theirs, so that one search finds a request in every log."""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
MAX_CHARACTERS = 128
HARMFUL = re.compile(r"[^A-Za-z0-9._:-]")


class RequestIds:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request its id, and the answer the header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """The id that the middleware gave."""
    state: dict[str, Any] = scope["state"]
    return str(state["request_id"])


def _request_id(scope: Scope) -> str:
    given = dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1")
    return HARMFUL.sub("", given)[:MAX_CHARACTERS] or f"req-{secrets.token_hex(12)}"
