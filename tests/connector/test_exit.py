"""Processes that end without closing their transport."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.connector.far_process import Kind, needs_nixl

# The memory goes before the transport does, as it may when a process ends.
LEAVE = """
import sys
from tests.connector.near import Near, runs
near = Near(sys.argv[1])
peer = near.transport.connect(near.transport.describe())
near.wait([near.post(peer, "read", runs((0, 0, 4096)))])
for _ in range(20):
    near.post(peer, "read", runs((0, 4096, 40 << 20)))
if sys.argv[2] == "error":
    raise SystemExit(3)
"""


@pytest.mark.process
@pytest.mark.parametrize(("way", "code"), [("end", 0), ("error", 3)])
@pytest.mark.parametrize("kind", ["shm", "ucx", pytest.param("nixl", marks=needs_nixl)])
def test_a_process_may_end_with_batches_in_flight(kind: Kind, way: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, kind, way],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
