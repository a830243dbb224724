"""The decode worker's settings; the defaults live here and nowhere else."""

from __future__ import annotations

from connector import CANCELS_REMEMBERED_S
from worker import WorkerConfig


class DecodeConfig(WorkerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_requests` bounds the requests in flight. Each stage of a request has its deadline, in seconds: the remote
    prefill (queueing there included), the wait for free blocks (0: take what is free now, or fail), and the whole
    request.

    Raises:
        ValueError: it would refuse every request.
    """

    max_requests: int = 256
    prefill_timeout_s: float = 300.0
    reserve_timeout_s: float = 120.0
    request_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ValueError(f"decode.max_requests is {self.max_requests}; it must be at least 1")
        for name in ("prefill_timeout_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"decode.{name} is {getattr(self, name)}; it must be above 0 seconds")
        if self.connector.mode == "write" and self.prefill_timeout_s > CANCELS_REMEMBERED_S:
            raise ValueError(
                f"decode.prefill_timeout_s is {self.prefill_timeout_s}; with connector.mode write it must be at most "
                f"{CANCELS_REMEMBERED_S:g} seconds, which is how long a prefill worker remembers cancelled transfers"
            )
        if not self.reserve_timeout_s >= 0:
            raise ValueError(f"decode.reserve_timeout_s is {self.reserve_timeout_s}; it must be 0 seconds or more")
