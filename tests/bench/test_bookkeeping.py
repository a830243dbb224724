from __future__ import annotations

import pytest

from bench.bookkeeping import main


def test_everything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(blocks=20, sources=20)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert all(" ms  " in line for line in lines)
    assert any("LBNHC: 640 runs" in line for line in lines)
