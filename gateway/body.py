"""The JSON object that a request's body holds."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Receive, Scope

from gateway.disconnect import ClientGone
from gateway.errors import ApiError, bad_request
from gateway.fields import Fields


async def read_fields(scope: Scope, receive: Receive, max_bytes: int) -> Fields:
    """Read the whole body.

    Raises:
        ApiError: 413 when it is longer than `max_bytes`; 400 when it is no JSON object.
        ClientGone: the client left before all of it had come.
    """
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return _parsed(bytes(body))


def _parsed(body: bytes) -> Fields:
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", None, "invalid_json")
    return Fields(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
