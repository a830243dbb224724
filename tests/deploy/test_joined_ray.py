"""A Ray cluster that was there before and stays: joined, used, left."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.processes import end_session, session_environment
from tests.cluster import ClusterHandle

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


class RunningRay(NamedTuple):
    """Where it is, and what its clients need in their environment."""

    address: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def running_ray() -> Iterator[RunningRay]:
    """A Ray of two CPUs that somebody else has started."""
    session = secrets.token_hex(8)
    folder = tempfile.mkdtemp(prefix="ray-")
    client = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ray = Path(sys.executable).with_name("ray")
    options = ["--head", "--port=0", "--num-cpus=2", f"--temp-dir={folder}", "--include-dashboard=false"]
    try:
        subprocess.run(
            [ray, "start", *options, "--object-store-memory=80000000"],
            env={**os.environ, **client, **session_environment(session)},
            check=True,
            capture_output=True,
            timeout=120,
        )
        yield RunningRay((Path(folder) / "ray_current_cluster").read_text(), client)
    finally:
        assert end_session(session, grace_s=10.0) == []
        shutil.rmtree(folder, ignore_errors=True)


def joining(ray: RunningRay, **settings: str) -> ClusterHandle:
    merged = {"ray.address": ray.address, **{key.replace("__", "."): value for key, value in settings.items()}}
    return ClusterHandle(merged, ray.environment)


def test_a_cluster_that_was_joined_is_left_as_it_was(running_ray: RunningRay) -> None:
    with joining(running_ray) as cluster:
        cluster.up()
        status = cluster.status()
        (decode,) = status["pools"]["decode"]
        assert decode["state"] == "READY"
        # Peers on other nodes have to reach it: never the loopback address.
        assert not any(worker.rpc.startswith("127.") for worker in cluster.state.workers)
        cluster.stop()
        cluster.up()
        cluster.stop()


def test_what_others_use_is_not_waited_for_longer_than_said(running_ray: RunningRay) -> None:
    whole = {"prefill__num_cpus": "1", "decode__num_cpus": "1"}
    with joining(running_ray, **whole) as first, joining(running_ray, **whole, placement_timeout_s="1") as second:
        first.up()
        code, _, err = second.kvferry("up")
        assert code == 2
        assert "Ray could not place the workers within 1 s (prefill-0: 1 CPU; decode-0: 1 CPU)" in err
        assert "free in the whole cluster: 0 CPU" in err
        assert [worker["state"] for pool in first.status()["pools"].values() for worker in pool] == ["READY"] * 2
        first.stop()


def test_an_address_where_no_ray_is_is_one_sentence() -> None:
    with ClusterHandle({"ray.address": "127.0.0.1:1"}) as cluster:
        code, _, err = cluster.kvferry("up")
        assert code == 1
        assert "could not join the Ray cluster at 127.0.0.1:1: " in err
        assert "Traceback" not in err
