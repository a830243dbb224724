"""The whole thing, for real: started, asked, stopped, killed. Every test ends with nothing left."""

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import openai
import psutil
import pytest

from tests.cluster import ClusterHandle, start_cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterHandle]:
    with start_cluster({}) as running:
        yield running


@pytest.fixture
def unstarted() -> Iterator[ClusterHandle]:
    with ClusterHandle({}) as handle:
        yield handle


@contextlib.contextmanager
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def read_until(stream: IO[str] | None, text: str) -> None:
    """Read up to the first line with `text`."""
    assert stream is not None
    seen = ""
    for line in stream:
        seen += line
        if text in line:
            return
    raise AssertionError(f"{text!r} never came:\n{seen}")


def rest(process: subprocess.Popen[str]) -> str:
    """The rest of standard error, to the end of the process."""
    assert process.stderr is not None
    seen = process.stderr.read()
    process.wait(timeout=60)
    return seen


def test_status_has_the_shape_that_scripts_rely_on(cluster: ClusterHandle) -> None:
    status = cluster.status()
    assert status.keys() == {"cluster", "gateways", "pools"}
    assert status["cluster"] == cluster.name
    assert status["gateways"] == [{"url": cluster.url, "state": "READY"}]
    assert status["pools"].keys() == {"prefill", "decode"}
    (prefill,) = status["pools"]["prefill"]
    (decode,) = status["pools"]["decode"]
    for worker in (prefill, decode):
        assert list(worker) == [
            "name",
            "incarnation",
            "state",
            "pid",
            "host",
            "blocks_total",
            "blocks_free",
            "sources_held",
            "imports_active",
            "requests_running",
            "requests_waiting",
            "peers",
        ]
        assert worker["state"] == "READY"
        assert worker["blocks_free"] == worker["blocks_total"] > 0
        assert psutil.Process(worker["pid"]).is_running()
    (peer,) = decode["peers"]
    assert (peer["name"], peer["transport"]) == ("prefill-0", "shm")
    assert peer["gb_per_s"] > 0


def test_status_for_people_names_everybody(cluster: ClusterHandle) -> None:
    code, out, _ = cluster.kvferry("status")
    assert code == 0
    for word in (cluster.name, cluster.url, "prefill-0", "decode-0", "shm"):
        assert word in out


def test_the_official_client_gets_an_answer(cluster: ClusterHandle) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=cluster.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=32,
    )
    assert "Paris" in (answer.choices[0].message.content or "")


def test_a_second_cluster_of_the_same_name_is_refused(cluster: ClusterHandle) -> None:
    code, _, err = cluster.kvferry("up")
    assert code == 2
    assert f"a cluster called {cluster.name!r} is already up" in err


def test_its_state_is_for_its_user_only(cluster: ClusterHandle) -> None:
    state = cluster.folder / "kvferry" / cluster.name / "state.json"
    assert state.stat().st_mode & 0o077 == 0
    assert cluster.state.token not in json.dumps(cluster.status())


def test_workers_take_care_of_shared_cores_and_never_look_at_a_hub(cluster: ClusterHandle) -> None:
    for worker in cluster.state.workers:
        assert psutil.Process(worker.pid).nice() == psutil.Process().nice()
        environment = psutil.Process(worker.pid).environ()
        assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == ("1", "PASSIVE")
        assert environment["HF_HUB_OFFLINE"] == "1"


def test_the_owner_and_the_gateway_hold_no_model_code(cluster: ClusterHandle) -> None:
    for pid in (cluster.state.owner.pid, cluster.state.gateways[0].pid):
        assert not [region.path for region in psutil.Process(pid).memory_maps() if "libtorch" in region.path]


def test_down_leaves_nothing_and_the_ports_are_free_again(unstarted: ClusterHandle) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    summary = unstarted.up()
    url = unstarted.url
    assert f"KVFerry is ready: {url}" in summary
    assert "prefill-0 → decode-0: shm" in summary
    assert f"curl {url}/v1/chat/completions" in summary
    processes = [psutil.Process(pid) for pid in unstarted.pids()]
    unstarted.stop()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert set(os.listdir("/dev/shm")) <= shared_memory
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass
    assert unstarted.kvferry("status")[0] == 3
    assert unstarted.kvferry("down")[0] == 0
    assert not (Path.home() / ".ray").exists()


def test_ctrl_c_of_a_ready_cluster_stops_it_in_order(unstarted: ClusterHandle) -> None:
    with unstarted.popen("up") as owner:
        read_until(owner.stdout, "KVFerry is ready")
        session = unstarted.state.session
        owner.send_signal(signal.SIGINT)
        err = rest(owner)
    assert owner.returncode == 0
    positions = [err.index(phase) for phase in ("draining the gateways", "stopping decode", "stopping prefill")]
    assert positions == sorted(positions)
    assert session
    assert unstarted.left_behind() == []


@pytest.mark.parametrize("phase", ["model: ", "ray: starting Ray", "ray: running", "prefill-0: ", "decode-0: loaded"])
def test_ctrl_c_at_any_moment_of_the_start_leaves_nothing(unstarted: ClusterHandle, phase: str) -> None:
    with unstarted.popen("up") as owner:
        read_until(owner.stderr, phase)
        assert unstarted.state.session
        owner.send_signal(signal.SIGINT)
        err = rest(owner)
    assert owner.returncode == 130
    assert "Traceback" not in err
    assert "interrupted; everything has been stopped" in err
    assert unstarted.left_behind() == []


def test_a_second_ctrl_c_kills(unstarted: ClusterHandle) -> None:
    with unstarted.popen("up") as owner:
        read_until(owner.stderr, "decode-0: loaded")
        assert unstarted.state.session
        owner.send_signal(signal.SIGINT)
        read_until(owner.stderr, "shutdown: ")
        owner.send_signal(signal.SIGINT)
        rest(owner)
    assert owner.returncode == 130
    assert unstarted.left_behind() == []


def test_when_the_owner_is_killed_everything_goes(unstarted: ClusterHandle) -> None:
    unstarted.up()
    owner = unstarted.state.owner.process()
    assert owner is not None
    guard = next(child for child in owner.children() if "deploy.guard" in child.cmdline())
    workers = [psutil.Process(pid) for pid in unstarted.pids()]
    owner.kill()
    guard.wait(timeout=60)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert unstarted.left_behind() == []
    assert unstarted.kvferry("status")[0] == 3


def test_after_owner_and_guard_were_killed_the_next_start_cleans_up(unstarted: ClusterHandle) -> None:
    unstarted.up()
    first = unstarted.state
    owner = first.owner.process()
    assert owner is not None
    guard = next(child for child in owner.children() if "deploy.guard" in child.cmdline())
    guard.kill()
    owner.kill()
    code, _, err = unstarted.kvferry("status")
    assert code == 3
    assert "was killed; clean up after it with `kvferry down`" in err
    unstarted.up()
    assert unstarted.state.session != first.session
    assert not Path(first.session_dir).exists()
    unstarted.stop()


def test_a_worker_that_dies_ends_the_cluster_with_its_name_and_log(unstarted: ClusterHandle) -> None:
    with unstarted.popen("up") as owner:
        read_until(owner.stdout, "KVFerry is ready")
        worker = next(worker for worker in unstarted.state.workers if worker.role == "decode")
        os.kill(worker.pid, signal.SIGSEGV)
        err = rest(owner)
    assert owner.returncode == 1
    assert "decode-0 died: " in err
    assert "Fatal Python error: Segmentation fault" in err
    assert unstarted.left_behind() == []


def test_a_busy_port_is_refused_before_anything_starts(unstarted: ClusterHandle) -> None:
    with busy_port() as port:
        code, _, err = unstarted.kvferry("up", "--port", str(port))
    assert code == 2
    assert f"port {port} on 127.0.0.1 is already in use" in err
    assert "starting Ray" not in err


def test_a_resource_that_ray_does_not_have_is_refused_by_name(unstarted: ClusterHandle) -> None:
    with unstarted.popen("up", "--set", "decode.resources={rdma_nic: 1}") as owner:
        read_until(owner.stderr, "ray: running")
        assert unstarted.state.session
        err = rest(owner)
    assert owner.returncode == 2
    assert "Ray does not have the resources: 2 workers ask for 1 rdma_nic (0 present)" in err
    assert unstarted.left_behind() == []


def test_a_worker_that_cannot_start_is_one_sentence(unstarted: ClusterHandle) -> None:
    library = "/no/such/libucp.so"
    settings = ["--set", "connector.transport=ucx", "--set", f"connector.ucx_library={library}"]
    with unstarted.popen("up", *settings) as owner:
        read_until(owner.stderr, "prefill-0: ")
        assert unstarted.state.session
        err = rest(owner)
    assert owner.returncode == 1
    assert "Traceback" not in err
    assert library in err.splitlines()[-1]
    assert unstarted.left_behind() == []
