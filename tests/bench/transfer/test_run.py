"""The command: refused in one sentence, or run with real processes."""

import json
from pathlib import Path

import pytest

from deploy import cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--transports", "smh"], "unknown transport 'smh' (--transports); did you mean shm?"),
        (["--rounds", "0"], "--rounds is 0; at least one round is needed"),
        (["--seed", "-1"], "--seed is -1"),
        (["--plot", "picture.gif"], "a picture is a .png or .svg file"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "transfer", "--quick", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.process
def test_a_quick_run_measures_checks_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "transfer.json"
    arguments = ["--quick", "--rounds", "3", "--transports", "memcpy,shm,ucx", "--json", str(file)]
    assert cli.main(["bench", "transfer", *arguments]) == 0
    assert "READ: median" in capsys.readouterr().out
    told = json.loads(file.read_text())
    assert told["bench"] == "transfer"
    assert set(told) == {"bench", "version", "machine", "settings", "results", "summary"}
    cells = [(4096, 1), (4096, 64), (65536, 1), (65536, 64)]
    expected = [(cell, op, name) for cell in cells for op in ("read", "write") for name in ("memcpy", "shm", "ucx")]
    rows = told["results"]
    assert [((row["page_bytes"], row["pages"]), row["op"], row["transport"]) for row in rows] == expected
    for row in rows:
        assert row["rounds"] == 3
        assert 0 < row["median_us"] <= row["p99_us"]
        assert row["gb_per_s"] > 0
        told_of = row["op"] == "write" and row["transport"] != "memcpy"
        assert (row["notified_us"] is not None) == told_of
        if told_of:
            assert row["notified_us"] > 0
    assert set(told["summary"]) == {"memcpy", "shm", "ucx"}
    assert told["summary"]["shm"]["read"]["vs_memcpy"] > 0
    assert told["summary"]["shm"]["write"]["vs_nixl"] is None
    assert told["settings"]["unavailable"] == {}
    assert told["settings"]["not_asked_for"] == ["ucx-tcp", "tcp", "nixl", "nixl-tcp", "mooncake"]


@pytest.mark.process
def test_a_contender_that_cannot_run_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nixl_cu12.py").write_text("raise ImportError('no such library')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "transfer.json"
    arguments = ["--quick", "--rounds", "1", "--transports", "memcpy,nixl", "--json", str(file)]
    assert cli.main(["bench", "transfer", *arguments]) == 0
    told = json.loads(file.read_text())
    assert told["settings"]["unavailable"] == {"nixl": "ImportError: no such library"}
    assert {row["transport"] for row in told["results"]} == {"memcpy"}
    assert "Not measured: nixl: ImportError: no such library" in capsys.readouterr().out
