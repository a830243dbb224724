"""Where a worker can be reached, as it tells whoever started it."""

from __future__ import annotations

import msgspec


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`role` is "prefill" or "decode". `rpc` is "host:port" of its gRPC server, the connector's listener is apart."""

    name: str
    role: str
    incarnation: int
    rpc: str
    connector_host: str
    connector_port: int
    pid: int
    host: str
