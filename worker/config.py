"""The settings that both kinds of worker have."""

from __future__ import annotations

import msgspec

from connector import ConnectorConfig
from engine import EngineConfig


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker. `host` is bound and advertised by its gRPC server on `rpc_port` (0: any free port), `token` is the
    cluster's secret."""

    name: str
    host: str
    model_path: str
    engine: EngineConfig
    connector: ConnectorConfig
    token: str
    rpc_port: int = 0
