"""A gRPC server as every worker has it: one kept port, the token, health, reflection, deadlines for stopping.

A name such as `localhost` may stand for several addresses. gRPC is content when it gets the port on one of them, and
whoever holds it on another would be called in this server's stead. So one address is taken, and others are told that
one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rpc.auth import TokenRequired
from rpc.errors import BindError

MAX_MESSAGE_BYTES = 16 << 20
"""Prompts travel as token ids; 16 MiB hold millions of them."""

OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers must never share a port unseen
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class RpcServer:
    """Add services to `server`, then `start`. Uses the running event loop."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host = host
        self._port = port
        self.server: grpc.aio.Server = grpc.aio.server(interceptors=(TokenRequired(token),), options=OPTIONS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    async def start(self, services: Sequence[str]) -> str:
        """Take the port and answer. `services` are the full names that health and reflection show.

        Returns "address:port", the address in figures.

        Raises:
            BindError: the address is busy, not this host's, or a wildcard, which nobody else could call.
        """
        address = await _resolve(self._host)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        try:
            port = self.server.add_insecure_port(f"{address}:{self._port}")
        except RuntimeError as error:
            raise BindError(f"gRPC cannot listen on {address}:{self._port}: it is busy, or not of this host") from error
        await self.server.start()
        for name in ("", *services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return f"{address}:{port}"

    async def drain(self) -> None:
        """Tell health checks that this server takes no new work."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end within `grace_s`, cancel the rest. Stopping twice is harmless."""
        await self.server.stop(grace_s)


async def _resolve(host: str) -> str:
    """The address to take, as it stands before a port."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BindError(f"gRPC cannot listen on {host!r}: {error}; name an address of this host") from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_unspecified:
        raise BindError(
            f"gRPC cannot listen on {host!r}: others are told this address and cannot call a wildcard; name the "
            "address that they reach this host by"
        )
    return f"[{address}]" if ":" in address else address
