"""One running cluster per way of handing pages over, shared by all: real processes, the real small model, float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ClusterHandle, default_model, start_cluster

WAYS = ("shm", "ucx", "shm write")


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model's folder."""
    return default_model()


@pytest.fixture(scope="package", params=WAYS)
def cluster(request: pytest.FixtureRequest) -> Iterator[ClusterHandle]:
    """One prefill worker, one decode worker and a gateway over the transport, and in the mode, of the parameter."""
    transport, _, mode = request.param.partition(" ")
    settings = {
        "engine.dtype": "float32",
        "engine.kv_cache_bytes": "1GiB",
        "connector.transport": transport,
        "connector.mode": mode or "read",
    }
    with start_cluster(settings) as handle:
        yield handle
        handle.stop()
