"""The command: refused in one sentence, or run with an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deploy import cli
from tests.engine.tiny import make_tiny


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; at least one round is needed"),
        (["--context", "32"], "--context is 32; it is more than 32, the tokens that a round draws"),
        (["--chunk", "0"], "--chunk is 0; it is at least 1"),
        (["--threads", "0"], "--threads is 0; it is at least 1"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--model", "nothing-of-the-kind"], "neither a folder nor a known name"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny(tmp_path)
    capsys.readouterr()
    assert cli.main(["bench", "engine", "--quick", "--model", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_quick_run_measures_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny(tmp_path, "LlamaForCausalLM", torch.bfloat16, max_position_embeddings=512)
    file = tmp_path / "engine.json"
    arguments = ["--quick", "--context", "64", "--chunk", "64", "--model", str(tmp_path), "--json", str(file)]
    assert cli.main(["bench", "engine", *arguments]) == 0
    assert "One token for each sequence" in capsys.readouterr().out
    told = json.loads(file.read_text())
    assert told["bench"] == "engine"
    assert set(told) == {"bench", "version", "machine", "settings", "results", "summary"}
    summary = told["summary"]
    assert set(summary["decode_ms"]) == set(summary["decode_limit_ms"]) == set(summary["decode_fraction"]) == {"1", "4"}
    for row in told["results"]["decode"]:
        assert row["steps"] == 32
        parts = ("schedule_ms", "build_ms", "forward_ms", "sample_ms")
        assert sum(row[part]["lower"] for part in parts) <= row["step_ms"]["upper"]
        assert row["limit_ms"] > 0
        assert row["fraction"] <= row["machine_fraction"]
    assert told["results"]["prefill"]["steps"] == 4
    assert summary["prefill_tokens_per_s"] > 0
    assert summary["overhead_ms"] > 0
    assert set(told["results"]["limits"]["gflops"]) == {"packed", "plain", "float32"}
