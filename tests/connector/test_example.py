"""The example that others copy from has to work, and to stay short."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_processes.py"


@pytest.mark.process
async def test_two_processes_exchange_pages() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60.0):
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out.decode().strip() == "40 tokens by shm: [5, 2, 7]"


def test_it_takes_less_than_sixty_lines() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
