"""Every setting of a deployment, as frozen structs.

What belongs to a room is that room's own struct, or has the default of it; what is new here concerns placing and
starting only. `deploy.config` merges file, environment and flags into these.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from connector.config import ConnectorConfig
from decode.config import DecodeConfig
from engine.config import EngineConfig
from gateway.config import GatewayConfig
from prefill.config import PrefillConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Duration = Annotated[float, msgspec.Meta(gt=0)]


def default_of(room: type[msgspec.Struct], name: str) -> Any:
    """The default of a room's own setting: it stands there and nowhere else."""
    (field,) = [field for field in msgspec.structs.fields(room) if field.name == name]
    return field.default


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers a pool has, and what each reserves in Ray.

    `num_cpus` None is half a CPU per compute thread: the two pools of the embedded default take turns on the cores.
    `resources` are Ray's custom resources, e.g. to tell nodes apart.
    """

    count: Count = 1
    num_cpus: Amount | None = None
    num_gpus: Amount = 0.0
    resources: dict[str, float] = {}


class PrefillSettings(PoolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prefill pool; for the rest see `PrefillConfig`."""

    max_queue: Count = default_of(PrefillConfig, "max_queue")


class DecodeSettings(PoolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decode pool; for the rest see `DecodeConfig`."""

    max_requests: Count = default_of(DecodeConfig, "max_requests")
    prefill_timeout_s: Duration = default_of(DecodeConfig, "prefill_timeout_s")
    reserve_timeout_s: Duration = default_of(DecodeConfig, "reserve_timeout_s")
    request_timeout_s: Duration = default_of(DecodeConfig, "request_timeout_s")


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateways: `count` of them on consecutive ports from `port` on; 0 is any free port for each.

    For the rest see `GatewayConfig`.
    """

    count: Count = 1
    host: str = default_of(GatewayConfig, "host")
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = default_of(GatewayConfig, "port")
    max_body_bytes: Count = default_of(GatewayConfig, "max_body_bytes")
    request_timeout_s: Duration = default_of(GatewayConfig, "request_timeout_s")
    status_wait_s: Duration = default_of(GatewayConfig, "status_wait_s")
    keepalive_s: Duration = default_of(GatewayConfig, "keepalive_s")
    describe_timeout_s: Duration = default_of(GatewayConfig, "describe_timeout_s")
    probe_timeout_s: Duration = default_of(GatewayConfig, "probe_timeout_s")
    scrape_timeout_s: Duration = default_of(GatewayConfig, "scrape_timeout_s")


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
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineConfig = EngineConfig()
    connector: ConnectorConfig = ConnectorConfig()
    ray: RaySettings = RaySettings()
    log: LogSettings = LogSettings()
