"""NIXL, in processes of its own: its UCX and the one that other tests load exclude each other."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from connector.transport.nixl_agent import MODULE

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec(MODULE) is None, reason=f"{MODULE} is not installed (extra nixl)"),
]


def suite(*arguments: str, **environment: str) -> None:
    """Run the suite in its own process; what it says is shown when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/connector/nixl_suite.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", ["TestConformance", "TestFailures", "test_"])
def test_on_one_host(part: str) -> None:
    suite("-k", part)


def test_as_to_another_host() -> None:
    suite("-k", "page or large or scattered or dies or stopped or fence or idle", UCX_TLS="tcp,self")
