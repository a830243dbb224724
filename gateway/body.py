"""The JSON object that a request's body holds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Receive, Scope

from gateway.disconnect import ClientGone
from gateway.errors import ApiError, bad_request
from gateway.fields import Fields

CLOSE = {"connection": "close"}


async def read_fields(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> Fields:
    """Read the whole body.

    Raises:
        ApiError: 413 when it is longer than `max_bytes`; 408 when it does not come in time; 400 when it is no object.
        ClientGone: the client left before all of it had come.
    """
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(receive, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s", code="timeout", headers=CLOSE) from None
    return _parsed(body)


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _parsed(body: bytes) -> Fields:
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
        if b"\\u" in body:
            # Half a surrogate pair is a string to the parser, but it is no text.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", None, "invalid_json")
    return Fields(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _too_large(max_bytes: int) -> ApiError:
    # Not with "connection: close": a client that is still sending would be reset before it has read this.
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
