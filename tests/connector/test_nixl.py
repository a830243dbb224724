"""NIXL, in processes of its own: its UCX and the one that other tests load exclude each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from connector.errors import RegistrationError
from connector.transport import nixl_agent
from tests.connector.far_process import needs_nixl

PATIENCE_S = 800
"""For a whole suite, each of whose tests has a deadline of its own."""
ROOT = Path(__file__).parents[2]

AFTER_UCX = """
from connector.transport.nixl import NixlTransport
from connector.transport.ucx import UcxTransport
one = UcxTransport("one")
NixlTransport("two")
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def suite(which: str, **environment: str) -> None:
    """Run those tests of the suite; what they say is shown when one fails."""
    files = ["tests/connector/nixl_suite.py", "-p", "no:cacheprovider"]
    done = run("-m", "pytest", "-q", *files, "-k", which, **environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.timeout(PATIENCE_S + 60)
@needs_nixl
@pytest.mark.parametrize("part", ["TestConformance", "TestFailures", "TestNixl"])
def test_on_one_host(part: str) -> None:
    suite(part)


@pytest.mark.process
@pytest.mark.timeout(PATIENCE_S + 60)
@needs_nixl
def test_as_between_hosts() -> None:
    # Without the stopped peer that is fenced while it is read from: see docs/transports.md, "NIXL".
    suite(
        "(page or large or scattered or dies or stopped or fence or idle) and not test_a_stopped_peer_can_be_fenced",
        UCX_TLS="tcp,self",
    )


@pytest.mark.process
@needs_nixl
def test_a_process_with_another_ucx_is_refused() -> None:
    done = run("-c", AFTER_UCX)
    assert "NIXL's own copy cannot share the process with it" in done.stderr


def test_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MODULE", "nixl_that_nobody_has")
    monkeypatch.setattr(nixl_agent, "loaded_library", lambda: None)
    with pytest.raises(RegistrationError, match=r"install kvferry\[nixl\], or use another transport"):
        nixl_agent.Library()
