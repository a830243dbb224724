"""One running cluster per transport, shared by a module: real processes, the real small model, float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ClusterHandle, default_model, start_cluster

TRANSPORTS = ("shm", "ucx")


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model's folder."""
    return default_model()


@pytest.fixture(scope="package", params=TRANSPORTS)
def cluster(request: pytest.FixtureRequest) -> Iterator[ClusterHandle]:
    """One prefill worker, one decode worker and a gateway over the transport named by the parameter."""
    settings = {
        "engine.dtype": "float32",
        "engine.kv_cache_bytes": "1GiB",
        "connector.transport": request.param,
    }
    with start_cluster(settings) as handle:
        yield handle
        handle.stop()
