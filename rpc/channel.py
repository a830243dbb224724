"""A channel to a worker: with the token on every call, and pings that notice a peer that is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from rpc.auth import credentials
from rpc.server import MAX_MESSAGE_BYTES

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # workers are reached directly, whatever proxy the shell is set to
)


def open_channel(target: str, token: str) -> grpc.aio.Channel:
    """A channel to the worker at `target` ("host:port"). Nothing is connected until the first call."""
    interceptors: list[Any] = [_UnaryToken(token), _StreamToken(token)]
    return grpc.aio.insecure_channel(target, options=OPTIONS, interceptors=interceptors)


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *credentials(token))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _UnaryToken(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _StreamToken(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)
