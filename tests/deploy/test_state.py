import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from deploy.errors import AlreadyRunning
from deploy.processes import identify
from deploy.state import ClusterState, GatewayRecord, StateFile


@pytest.fixture
def state() -> ClusterState:
    return ClusterState(
        cluster="c",
        phase="READY",
        owner=identify(os.getpid()),
        session="s",
        session_dir="/nowhere",
        logs_dir="/nowhere",
        token="secret",
        stop_grace_s=1.0,
        gateways=(GatewayRecord("gateway-0", "http://127.0.0.1:1", 1),),
    )


def test_what_is_written_is_read_and_only_its_user_may(tmp_path: Path, state: ClusterState) -> None:
    file = StateFile(tmp_path / "c")
    with file.own():
        file.write(state)
        assert file.read() == state
        assert stat.S_IMODE((tmp_path / "c" / "state.json").stat().st_mode) == 0o600
        file.write(msgspec.structs.replace(state, phase="STOPPING"))
        assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["lock", "state.json"]


def test_nothing_is_left_after_the_owner(tmp_path: Path, state: ClusterState) -> None:
    file = StateFile(tmp_path / "c")
    with file.own():
        file.write(state)
        (tmp_path / "c" / ".state-interrupted").touch()
    assert file.read() is None
    assert list(tmp_path.iterdir()) == []


def test_logs_in_the_same_folder_stay(tmp_path: Path) -> None:
    with StateFile(tmp_path / "c").own():
        (tmp_path / "c" / "logs").mkdir()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["logs"]


def test_a_second_owner_is_refused_and_told_of_the_first(tmp_path: Path, state: ClusterState) -> None:
    file = StateFile(tmp_path / "c")
    with file.own():
        file.write(state)
        with (
            pytest.raises(AlreadyRunning, match=rf"'c' is already up \(process {os.getpid()}\).*--cluster c"),
            file.own(),
        ):
            pass
        assert file.read() == state
    with file.own():
        assert file.read() is None


def test_the_name_is_free_when_its_owner_was_killed(tmp_path: Path, state: ClusterState) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib, deploy.state as s\n"
            "with s.StateFile(pathlib.Path(sys.argv[1])).own():\n"
            "    print('owned', flush=True); sys.stdin.read()",
            str(tmp_path / "c"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    assert owner.stdout.readline() == b"owned\n"
    file = StateFile(tmp_path / "c")
    with pytest.raises(AlreadyRunning), file.own():
        pass
    owner.kill()
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    with file.own():
        file.write(state)


def test_a_state_that_is_not_whole_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"cluster": "c"')
    assert StateFile(tmp_path).read() is None
