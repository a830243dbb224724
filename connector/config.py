"""The connector's settings; the defaults live here and nowhere else."""

from __future__ import annotations

from typing import Literal

import msgspec


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker hands pages over.

    `mode`: in `read` the consumer pulls pages after they have been computed, in `write` the producer pushes each layer
    as it is computed; both ends have to agree.
    `transport`: `auto` takes shared memory to a peer on the same host and UCX otherwise; a named one is required.
    `nixl` is only ever required: it brings a UCX of its own, which excludes ours from the process (extra `nixl`).
    `tcp` is the fastest over plain TCP, where there is no RDMA; it listens on `host`, too, on any port, or within
    `port_range` where that is set.
    `host` is bound and advertised: peers connect to it, so it is never a wildcard. `port` is one fixed port, or 0 for
    any; `port_range` ("9000-9100", both ends included) tries each in turn; only one of the two may be set.
    `lease_s` is how long a source is kept for a consumer that has gone silent, `renew_s` how often a consumer renews.
    `heartbeat_s` is how often a consumer asks a producer for a sign of life: after three without one it gets no new
    work, after ten the connection is made anew.
    `handshake_timeout_s` bounds every answer of a peer, `import_timeout_s` one READ from the moment it is posted.
    `tls_cert`, `tls_key`, `tls_ca` (absolute paths of PEM files; all or none): the control connections are TLS 1.3, and
    both ends show a certificate that `tls_ca` has signed.
    `ucx_library`: "" takes what is loaded or found, `system`, `wheel`, or the path of a libucp.so.

    Raises:
        ValueError: for values that cannot work together; the message names them.
    """

    transport: Literal["auto", "shm", "ucx", "nixl", "tcp"] = "auto"
    mode: Literal["read", "write"] = "read"
    host: str = "127.0.0.1"
    port: int = 0
    port_range: str = ""
    lease_s: float = 30.0
    renew_s: float = 5.0
    heartbeat_s: float = 1.0
    handshake_timeout_s: float = 10.0
    import_timeout_s: float = 30.0
    ucx_library: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"connector.port is {self.port}; it must be 0 (any free port) or 1 to 65535")
        if self.port and self.port_range:
            raise ValueError(
                f"connector.port ({self.port}) and connector.port_range ({self.port_range!r}) are both set; keep one"
            )
        self.candidate_ports()
        for name in ("lease_s", "renew_s", "heartbeat_s", "handshake_timeout_s", "import_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"connector.{name} is {getattr(self, name)}; it must be above 0 seconds")
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        if any(files.values()) and not all(files.values()):
            missing = [f"connector.{name}" for name, path in files.items() if not path]
            raise ValueError(
                f"TLS needs all of connector.tls_cert, tls_key and tls_ca; {' and '.join(missing)} is not set"
            )
        for name, path in files.items():
            if path and not path.startswith("/"):
                raise ValueError(f"connector.{name} is {path!r}; write an absolute path, for each worker reads it")
        if self.renew_s >= self.lease_s:
            raise ValueError(
                f"connector.renew_s ({self.renew_s}) must be below connector.lease_s ({self.lease_s}), "
                "or every lease ends before it is renewed"
            )

    def data_ports(self) -> range:
        """The ports that a transport may listen on, as `candidate_ports`. A fixed `port` is the connector's own."""
        return self.candidate_ports() if self.port_range else range(1)

    def candidate_ports(self) -> range:
        """The ports that the listener may take, in order; `range(0, 1)` means any free port."""
        if not self.port_range:
            return range(self.port, self.port + 1)
        first, dash, last = self.port_range.partition("-")
        if not (dash and first.strip().isdecimal() and last.strip().isdecimal()):
            raise ValueError(f'connector.port_range is {self.port_range!r}; write it as "9000-9100"')
        low, high = int(first), int(last)
        if not 1 <= low <= high <= 65535:
            raise ValueError(f"connector.port_range {self.port_range!r} is not a range within 1-65535")
        return range(low, high + 1)
