"""Every setting of a deployment, as frozen structs.

What belongs to a room is that room's own struct, with that room's defaults; here is only what concerns placing and
starting. `deploy.configuration` merges file, environment and flags into these.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from connector.config import ConnectorConfig
from engine.config import EngineConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Duration = Annotated[float, msgspec.Meta(gt=0)]


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers a pool has, and what each reserves in Ray.

    `num_cpus` None is half a CPU per compute thread: the two pools of the embedded default take turns on the cores.
    `resources` are Ray's custom resources, e.g. to tell nodes apart.
    """

    count: Count = 1
    num_cpus: Amount | None = None
    num_gpus: Amount = 0.0
    resources: dict[str, float] = {}


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateways: `count` of them on consecutive ports from `port` on; 0 is any free port for each."""

    count: Count = 1
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which Ray: `address` "" starts a local one and ends it again, `auto` or host:port joins a cluster.

    `num_cpus` and `object_store_bytes` are for the local one; 0 CPUs are those of the machine. The object store carries
    a few control messages and nothing else.
    """

    address: Annotated[str, msgspec.Meta(pattern=r"^(auto|[^/]+:[0-9]{1,5})?$")] = ""
    num_cpus: Annotated[int, msgspec.Meta(ge=0)] = 0
    object_store_bytes: Annotated[int, msgspec.Meta(ge=75 << 20)] = 80 << 20


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log files: one per process, in `folder` on the host where it runs ("" is the user's state directory)."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    folder: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One deployment.

    `model` is a known name or a folder; `served_name` "" is that name, or the folder's. `placement_timeout_s` bounds
    the wait for Ray to reserve what the workers ask for, `start_timeout_s` everything from there to the first answer,
    `stop_grace_s` how long requests in flight may still take when it is stopped.
    """

    cluster: Name = "kvferry"
    model: str = DEFAULT_MODEL
    served_name: str = ""
    placement_timeout_s: Duration = 10.0
    start_timeout_s: Duration = 300.0
    stop_grace_s: Duration = 10.0
    prefill: PoolSettings = PoolSettings()
    decode: PoolSettings = PoolSettings()
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineConfig = EngineConfig()
    connector: ConnectorConfig = ConnectorConfig()
    ray: RaySettings = RaySettings()
    log: LogSettings = LogSettings()
