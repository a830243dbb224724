"""Shared memory between processes of one host."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from connector.errors import RegistrationError, UnreachableError
from connector.transport.base import Memory, Runs
from connector.transport.shm import start_time
from tests.connector.far_process import far_process
from tests.connector.near import PATIENCE_S, Near, near_end, runs
from tests.connector.transport_conformance import TransportConformance
from tests.connector.transport_failures import TransportFailures


@pytest.mark.process
class TestConformance(TransportConformance):
    kind = "shm"


@pytest.mark.process
class TestFailures(TransportFailures):
    kind = "shm"


def _changed(description: bytes, **changes: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(description), **changes})


def _descriptors() -> int:
    """After what earlier tests left in reference cycles has gone; what they close late makes it fewer, never more."""
    gc.collect()
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def near() -> Iterator[Near]:
    with near_end("shm") as near:
        yield near


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_another_host_is_refused(near: Near, field: str) -> None:
    whole = near.transport.describe()
    host = msgspec.msgpack.decode(whole)["host"]
    host[field] = "another" if field == "boot_id" else host[field] + 1
    with pytest.raises(UnreachableError, match=r"another host or in another pid namespace .*use ucx"):
        near.transport.connect(_changed(whole, host=host))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"started": 1}, "is not the peer any more; it has ended"),
        ({"pid": 2**22 + 1}, "cannot be mapped"),
        ({"pid": 0}, "cannot be mapped"),
        ({"pid": -5}, "cannot be mapped"),
        ({"pid": 2**40}, "cannot be mapped"),
        ({"pid": "1"}, "is damaged"),
        ({"regions": None}, "is damaged"),
    ],
)
def test_processes_that_are_not_the_peer(near: Near, changes: dict[str, object], message: str) -> None:
    whole, before = near.transport.describe(), _descriptors()
    with pytest.raises(UnreachableError, match=message):
        near.transport.connect(_changed(whole, **changes))
    assert _descriptors() <= before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inode": 1}, "is not the pool that the peer described: inode"),
        ({"length": 4096}, "is not the pool that the peer described"),
        ({"length": 0}, "is not the pool that the peer described"),
        ({"length": -1}, "is not the pool that the peer described"),
        ({"fd": 99999}, "cannot be mapped"),
        ({"fd": -1}, "cannot be mapped"),
    ],
)
def test_descriptors_that_are_not_the_pool(near: Near, changes: dict[str, object], message: str) -> None:
    whole, before = near.transport.describe(), _descriptors()
    first, second = msgspec.msgpack.decode(whole)["regions"]
    with pytest.raises(UnreachableError, match=message):
        near.transport.connect(_changed(whole, regions=[first, {**second, **changes}]))
    assert _descriptors() <= before


def test_a_process_that_has_ended_but_was_not_reaped(near: Near) -> None:
    with far_process("shm") as far:
        os.kill(far.pid, signal.SIGKILL)
        os.waitid(os.P_PID, far.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(UnreachableError):
            near.transport.connect(far.description)


def test_memory_that_no_other_process_can_map(near: Near) -> None:
    memory = near.regions.memories[0]
    with pytest.raises(RegistrationError, match="lies in no memfd"):
        near.transport.register(msgspec.structs.replace(memory, fd=None))
    with pytest.raises(RegistrationError, match=rf"\({memory.length - 1} bytes\): .* has {memory.length} bytes"):
        near.transport.register(msgspec.structs.replace(memory, length=memory.length - 1))
    with pytest.raises(RegistrationError, match=r"shm cannot register region 2, .* descriptor 99999 is not open"):
        near.transport.register(msgspec.structs.replace(memory, fd=99999))
    with pytest.raises(RegistrationError, match=r"shm cannot register region 2, .* nothing is mapped at 0x1000"):
        near.transport.register(msgspec.structs.replace(memory, address=4096))


@pytest.fixture
def unsealed(tmp_path: Path) -> Iterator[list[int]]:
    """A memfd that allows seals, one that does not, and a file that has none."""
    files = [os.memfd_create("open", os.MFD_ALLOW_SEALING), os.memfd_create("no seals")]
    files.append(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    for fd in files:
        os.ftruncate(fd, 4096)
    yield files
    for fd in files:
        os.close(fd)


def test_memory_that_could_shrink_under_a_peer(near: Near, unsealed: list[int]) -> None:
    whole = near.transport.describe()
    first, _ = msgspec.msgpack.decode(whole)["regions"]
    for fd in unsealed:
        with pytest.raises(RegistrationError, match=f"descriptor {fd} is not sealed .* add F_SEAL_SHRINK"):
            near.transport.register(Memory(address=4096, length=4096, fd=fd))
        # A peer that has registered it anyway.
        region = {"fd": fd, "inode": os.fstat(fd).st_ino, "length": 4096}
        before = _descriptors()
        with pytest.raises(UnreachableError, match=f"/fd/{fd} is not sealed against shrinking"):
            near.transport.connect(_changed(whole, regions=[first, region]))
        assert _descriptors() <= before


def test_a_process_reaches_itself(near: Near) -> None:
    peer = near.transport.connect(near.transport.describe())
    assert near.wait([near.transport.post(peer, "read", 0, 1, runs((0, 0, 4096)), PATIENCE_S)]) == [None]
    assert bool((near.regions.arrays[0][:4096] == near.regions.arrays[1][:4096]).all())


def test_a_small_batch_is_over_when_it_has_been_posted(near: Near) -> None:
    peer, other = (near.transport.connect(near.transport.describe()) for _ in range(2))
    small, large = runs((0, 4096, 128 << 10), (200 << 10, 300 << 10, 128 << 10)), runs((0, 24 << 20, 24 << 20))
    posted = near.post(peer, "read", small)
    near.collect()
    assert near.completed == {posted: None}
    # Behind others of its peer it waits for its turn; those of other peers are no reason to.
    waiting = [near.post(peer, "read", batch) for batch in (large, large, large, small)]
    posted = near.post(other, "read", small)
    near.collect()
    assert near.completed[posted] is None
    assert near.wait(waiting) == [None] * 4


@pytest.mark.parametrize("page", [4095, 4096, (1 << 20) + 77])
def test_batches_that_are_too_large_for_the_caches(near: Near, page: int) -> None:
    peer, count = near.transport.connect(near.transport.describe()), (20 << 20) // page
    chance = np.random.default_rng(5)
    local, remote = (chance.permutation(count) * page + 3 for _ in range(2))
    mine = near.regions.arrays[0]
    mine[: 24 << 20] = np.frombuffer(chance.bytes(24 << 20), dtype=np.uint8)
    expected = mine.copy()
    remote += 24 << 20
    for to, source in zip(local, remote, strict=True):
        expected[to : to + page] = expected[source : source + page]
    batch = Runs(local=local, remote=remote, length=np.full(count, page, dtype=np.int64))
    assert near.wait([near.post(peer, "read", batch)]) == [None]
    assert np.array_equal(mine, expected)


def test_start_time_tells_processes_apart() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid())
    with pytest.raises(OSError, match="No such file"):
        start_time(2**22 + 1)
