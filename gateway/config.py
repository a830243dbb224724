"""The gateway's settings; the defaults live here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one gateway listens and how long it waits.

    `port` 0 is any free one. `served_name` "" is the name of the model's folder. `token` is the cluster's.
    `request_timeout_s` bounds a request from its first byte to the last byte of its answer. A stream's status is held
    back for up to `status_wait_s`, so that an early error still gets a status of its own; `keepalive_s` is the silence
    after which a stream that has begun gets a comment line.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    model_path: str
    served_name: str = ""
    token: str
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = 8 << 20
    request_timeout_s: Seconds = 600.0
    status_wait_s: Seconds = 30.0
    keepalive_s: Seconds = 10.0
    describe_timeout_s: Seconds = 10.0
    probe_timeout_s: Seconds = 60.0
    scrape_timeout_s: Seconds = 1.0

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_name or Path(self.model_path).resolve().name
