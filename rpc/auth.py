"""The cluster's token on every call. Only the health service answers without it, for probes that know no secrets."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

KEY = "authorization"
OPEN = "/grpc.health.v1.Health/"


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that proves the token."""
    return ((KEY, f"Bearer {token}"),)


class TokenRequired(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Ends calls without the token as UNAUTHENTICATED."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("the cluster token is empty; every process of a cluster needs the same secret")
        self._wanted = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """See `grpc.aio.ServerInterceptor`."""
        method = str(handler_call_details.method)
        given = dict(handler_call_details.invocation_metadata or ()).get(KEY, "")
        if method.startswith(OPEN) or hmac.compare_digest(str(given).encode(), self._wanted):
            return await continuation(handler_call_details)
        return _refuse(await continuation(handler_call_details))


def _refuse(handler: grpc.RpcMethodHandler[Any, Any] | None) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")

    if handler is not None and handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
