"""The command without a cluster: everything here is decided before Ray is even imported."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import cli, command_line


@pytest.fixture(autouse=True)
def clean_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def kvferry(*arguments: str) -> int:
    return cli.main(arguments)


def test_a_shown_configuration_names_flag_variable_file_and_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("decode:\n  count: 2\n")
    monkeypatch.setenv("KVFERRY_ENGINE__DTYPE", "float32")
    assert kvferry("config", "show", "-f", str(file), "--port", "9001", "--set", "prefill.count=3") == 0
    shown = {re.sub(r" +", " ", line).strip() for line in capsys.readouterr().out.splitlines()}
    assert "port: 9001 # --port" in shown
    assert "dtype: float32 # environment variable KVFERRY_ENGINE__DTYPE" in shown
    assert f"count: 2 # {file} line 2" in shown
    assert "count: 3 # --set" in shown
    assert "block_size: 16 # default" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "engine.dtpye=float32"], "unknown setting engine.dtpye (--set); did you mean engine.dtype?"),
        (["--port", "zero"], "gateway.port is 'zero' (--port); expected a whole number ≥ 0 and ≤ 65535"),
        (["-f", "absent.yaml"], "cannot read the configuration file absent.yaml"),
        (["--model", "/nowhere"], "model '/nowhere' is neither a folder nor a known name"),
        (["--model", "smollm2-135m-instrct"], "did you mean smollm2-135m-instruct?"),
        (["--prefill", "500"], "ask for 250.5 CPU"),
        (["--port", "65535", "--gateways", "2"], "would need port 65536"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence_before_anything_starts(
    arguments: list[str], message: str, clean_home: Path
) -> None:
    if "--port" not in arguments:
        with socket.create_server(("127.0.0.1", 0)) as free:
            arguments = [*arguments, "--port", str(free.getsockname()[1])]
    refused = subprocess.run([sys.executable, "-m", "deploy.cli", "up", *arguments], capture_output=True, text=True)
    assert refused.returncode == 2
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("kvferry:")]
    assert message in line
    assert not list(clean_home.rglob("state.json"))


def test_status_of_what_is_not_up_says_so_with_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvferry("status", "--cluster", "ghost") == 3
    assert kvferry("status", "--cluster", "ghost", "--json") == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("no cluster called 'ghost' is up") == 2


def test_down_of_what_is_not_up_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvferry("down", "--cluster", "ghost") == 0
    assert "no cluster called 'ghost' is up" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["upp"], ["up", "--sett", "a=b"], ["up", "--set", "engine.dtype"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kvferry(*arguments)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kvferry("--version")
    assert ended.value.code == 0
    assert re.fullmatch(r"kvferry \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_unknown_model_to_fetch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvferry("model", "fetch", "smollm2-135m") == 2
    assert "no model is known as 'smollm2-135m'; did you mean smollm2-135m-instruct?" in capsys.readouterr().err


def test_an_unexpected_error_is_one_sentence_and_a_log(
    clean_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> str:
        raise RuntimeError("cosmic ray")

    monkeypatch.setattr(command_line, "show", broken)
    assert kvferry("config", "show") == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    log = Path(error.rpartition("details in ")[2].strip())
    assert "RuntimeError: cosmic ray" in log.read_text()


def test_ctrl_c_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "show", interrupted)
    assert kvferry("config", "show") == 130
    assert capsys.readouterr().err == "kvferry: interrupted\n"
