"""The decode worker's settings; the defaults live here and nowhere else."""

from __future__ import annotations

from worker import WorkerConfig


class DecodeConfig(WorkerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_requests` bounds the requests in flight. Each stage of a request has its deadline, in seconds: the remote
    prefill (queueing there included), the wait for free blocks, and the whole request."""

    max_requests: int = 256
    prefill_timeout_s: float = 300.0
    reserve_timeout_s: float = 120.0
    request_timeout_s: float = 1800.0
