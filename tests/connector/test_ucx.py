"""UCX between processes."""

from __future__ import annotations

import json
import mmap
import re
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from connector.errors import RegistrationError, TransportError, UnreachableError
from connector.transport.base import Memory, Op
from connector.transport.ucx import UcxTransport
from tests.connector.far_process import far_process
from tests.connector.forged_keys import sealed
from tests.connector.near import Near, near_end, runs
from tests.connector.transport_conformance import TransportConformance
from tests.connector.transport_failures import TransportFailures


@pytest.mark.process
class TestConformance(TransportConformance):
    kind = "ucx"


@pytest.mark.process
class TestFailures(TransportFailures):
    kind = "ucx"


def test_memory_that_is_not_there() -> None:
    with near_end("ucx") as near:
        whole = near.regions.memories[0]
        beyond = 1 << 46
        for address, length in ((0, 4096), (0x1000, 4096), (whole.address, beyond), (whole.address, 1 << 62)):
            what = rf"near: ucx cannot register region 2, memory at {address:#x} \({length} bytes\): .*mapped"
            with pytest.raises(RegistrationError, match=what):
                near.transport.register(Memory(address=address, length=length, fd=None))
        read_only = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
        address = np.frombuffer(read_only, dtype=np.uint8).ctypes.data
        with pytest.raises(RegistrationError, match=f"{address:#x} may not be read and written"):
            near.transport.register(Memory(address=address, length=4096, fd=None))
        assert near.transport.register(whole) == 2


def test_what_a_device_refuses_names_the_choice_of_devices_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    near = Near("ucx")
    near.transport.close()
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, hard))
        advice = (
            r"region 2, .*is closed \(UCX_NET_DEVICES=all\); .* RLIMIT_MEMLOCK allows 4096 bytes: set it to unlimited"
        )
        with pytest.raises(RegistrationError, match=advice):
            near.transport.register(near.regions.memories[0])
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, soft)
    near.close()


def test_a_closed_transport_registers_and_describes_nothing() -> None:
    with near_end("ucx") as near:
        near.transport.close()
        with pytest.raises(RegistrationError, match="is closed"):
            near.transport.register(near.regions.memories[0])
        with pytest.raises(TransportError, match="is closed"):
            near.transport.describe()


@pytest.mark.parametrize("version", ["1.21.0", "1.2.0", "2.22.0", "1", ""])
def test_another_minor_version_is_refused(version: str) -> None:
    with near_end("ucx") as near:
        description = near.transport.describe()
        with pytest.raises(UnreachableError, match=f"the peer uses UCX {version}, this worker 1.22.0; different minor"):
            near.transport.connect(sealed(description, version=version))


def test_another_patch_of_the_same_minor_is_fine() -> None:
    with near_end("ucx") as near:
        peer = near.transport.connect(sealed(near.transport.describe(), version="1.22.9"))
        assert near.wait([near.post(peer, "read", runs((0, 4096, 4096)))]) == [None]


@pytest.mark.parametrize("key", ["base", "length"])
def test_regions_beyond_any_memory_are_refused(key: str) -> None:
    with near_end("ucx") as near:
        description = near.transport.describe()
        regions = msgspec.msgpack.decode(msgspec.msgpack.decode(description)["body"])["regions"]
        for value in (-1, 2**62, 2**64 - 1):
            with pytest.raises(UnreachableError, match="description is damaged"):
                near.transport.connect(sealed(description, regions=[{**regions[0], key: value}]))


def test_every_damaged_byte_is_noticed() -> None:
    with near_end("ucx") as near:
        whole = near.transport.describe()
        for place in range(0, len(whole), 5):
            with pytest.raises(UnreachableError, match="description is damaged"):
                near.transport.connect(bytes([*whole[:place], whole[place] ^ 0x10, *whole[place + 1 :]]))


def test_a_second_library_is_refused(tmp_path: Path) -> None:
    with near_end("ucx") as near:
        loaded = Path(near.transport.path)  # type: ignore[attr-defined]
        other = tmp_path / "libucp.so.0"
        other.write_bytes(loaded.read_bytes())
        with pytest.raises(RegistrationError, match=r"a second one, .*libucp.so.0, cannot share the process with it"):
            UcxTransport("two", str(other))


@pytest.mark.parametrize("chosen", ["self,posix", "^tcp"])
def test_transports_without_tcp_are_named(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    advice = rf"UCX_TLS is {re.escape(chosen)}, add tcp to it"
    with near_end("ucx") as near, pytest.raises(UnreachableError, match=advice):
        near.transport.connect(near.transport.describe())


@pytest.mark.parametrize("chosen", ["self,posix,tcp", "all", "^cma"])
def test_transports_with_tcp_reach_a_peer(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    with near_end("ucx") as near:
        peer = near.transport.connect(near.transport.describe())
        assert near.wait([near.post(peer, "read", runs((0, 4096, 4096)))]) == [None]


def test_transports_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "pigeon")
    with pytest.raises(RegistrationError, match=r"one: UCX 1.22.0, initialising: "):
        UcxTransport("one")


@pytest.mark.process
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_stopped_peer_is_down_when_a_batch_has_outlived_its_time(monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    """Over TCP the target has to help, and a stopped one reports nothing."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with far_process("ucx") as stopped, far_process("ucx") as fine, near_end("ucx") as near:
        late, other = (near.transport.connect(far.description) for far in (stopped, fine))
        batch = runs((0, 0, 1 << 20))
        assert near.wait([near.post(peer, op, batch, timeout_s=2.0) for peer in (late, other)]) == [None, None]
        stopped.stop()
        first, second = (near.post(late, op, batch, timeout_s=seconds) for seconds in (2.5, 3.0))
        near.wait(down=[late])
        assert near.down[late].cause == f"batch {first} (a {op} of 1048576 bytes) was not over within 2.5 s"
        assert not near.down[late].gone
        near.fence(late)
        assert all(near.wait([first, second]))
        # What completed before its time passed, and what belongs to others, is none of this.
        assert near.wait([near.post(other, op, batch)]) == [None]
        assert list(near.down) == [late]


@pytest.mark.process
@pytest.mark.parametrize("chosen", ["all", "tcp"])
def test_forged_keys_crash_nobody_and_reach_nothing_else(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    with far_process("ucx") as far:
        before = far.digests()
        done = subprocess.run(
            [sys.executable, "-m", "tests.connector.forged_keys"],
            input=far.description.hex(),
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr  # UCX says there what it could not unpack
        outcomes = json.loads(done.stdout)
        assert set(outcomes) <= {"refused", "lost", "failed", "read"}
        assert "refused" in outcomes
        assert far.digests() == before
