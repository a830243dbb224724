"""Which settings of threads are warned of."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engine import Engine, EngineConfig
from engine.threads import concerns
from tests.engine.tiny import Tiny


@pytest.mark.parametrize(
    ("threads", "cores", "environment", "expected"),
    [
        (1, 1, {}, []),
        (1, 8, {"OMP_WAIT_POLICY": "ACTIVE"}, []),
        (4, 8, {"OMP_WAIT_POLICY": "passive"}, []),
        (4, 8, {}, ["OMP_WAIT_POLICY is not PASSIVE"]),
        (4, 2, {"OMP_WAIT_POLICY": "PASSIVE"}, ["engine.compute_threads is 4, but this process may use 2 cores"]),
        (4, 2, {"OMP_WAIT_POLICY": "active"}, ["engine.compute_threads is 4", "OMP_WAIT_POLICY is not PASSIVE"]),
    ],
)
def test_concerns(threads: int, cores: int, environment: Mapping[str, str], expected: list[str]) -> None:
    found = concerns(threads, cores, environment)
    assert len(found) == len(expected)
    assert all(concern.startswith(beginning) for concern, beginning in zip(found, expected, strict=True))


def test_an_engine_says_so(llama: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(llama.info, EngineConfig(dtype="float32", kv_cache_bytes=1 << 20, compute_threads=999))
    engine.close()
    assert "engine.compute_threads is 999" in caplog.text
