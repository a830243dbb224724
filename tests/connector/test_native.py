"""The native core on its own: copying within a process, checking and merging runs, and the interpreter's lock."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from connector import _native
from connector._native import Copier, OutOfBounds, copy_runs, merged_runs, ucx_version

Bytes = npt.NDArray[np.uint8]


def copy(destination: Bytes, source: Bytes, *runs: tuple[int, int, int]) -> None:
    """Runs of (to, from, length)."""
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    to, from_, length = (np.ascontiguousarray(table[:, column]) for column in range(3))
    copy_runs(destination.ctypes.data, len(destination), source.ctypes.data, len(source), to, from_, length)


def test_copies_runs() -> None:
    source, destination = np.arange(100, dtype=np.uint8), np.zeros(60, dtype=np.uint8)
    copy(destination, source, (0, 90, 10), (10, 80, 10), (30, 5, 3), (59, 99, 1), (33, 8, 2), (60, 100, 0))
    expected = np.zeros(60, dtype=np.uint8)
    expected[0:10], expected[10:20], expected[30:35], expected[59] = source[90:], source[80:90], source[5:10], 99
    assert np.array_equal(destination, expected)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((55, 0, 6), "run 1 of the batch leaves the local region: offset 55, length 6, region 60 bytes"),
        ((0, 99, 2), "run 1 of the batch leaves the remote region: offset 99, length 2, region 100 bytes"),
        ((-1, 0, 1), "local region: offset -1"),
        ((0, 0, -1), "local region: offset 0, length -1"),
        ((2**63 - 1, 0, 2**63 - 1), "local region: offset 9223372036854775807"),
    ],
)
def test_a_run_that_leaves_a_region_is_named_and_nothing_is_copied(bad: tuple[int, int, int], message: str) -> None:
    source, destination = np.ones(100, dtype=np.uint8), np.zeros(60, dtype=np.uint8)
    with pytest.raises(OutOfBounds, match=message):
        copy(destination, source, (0, 0, 5), bad)
    assert not destination.any()


def merged(*runs: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """Runs of (local, remote, length) between regions of 20 and 50 bytes."""
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    local, remote, length = (np.ascontiguousarray(table[:, column]) for column in range(3))
    return merged_runs(local, remote, length, 20, 50)


def test_runs_are_merged_where_they_touch_on_both_sides() -> None:
    runs = merged((0, 10, 5), (5, 15, 5), (10, 30, 5), (16, 35, 2), (20, 20, 0), (18, 37, 1))
    assert runs.tolist() == [[0, 10, 10], [10, 30, 5], [16, 35, 3]]
    assert merged().shape == (0, 3)
    assert merged((20, 50, 0)).shape == (0, 3)


def test_runs_that_leave_a_region_are_not_merged() -> None:
    with pytest.raises(OutOfBounds, match="run 1 of the batch leaves the remote region: offset 49, length 2"):
        merged((0, 0, 5), (0, 49, 2))


def test_arrays_of_different_lengths_are_refused() -> None:
    one, two = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
    memory = np.zeros(10, dtype=np.uint8)
    for arrays in ((one, one, two), (one, two, one), (two, one, one)):
        with pytest.raises(ValueError, match="as many elements as each other"):
            copy_runs(memory.ctypes.data, 10, memory.ctypes.data, 10, *arrays)


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread keeps the interpreter until it gives it away."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(interval)


def test_the_interpreter_is_free_during_a_copy(no_forced_switches: None) -> None:
    source, destination = np.ones(64 << 20, dtype=np.uint8), np.zeros(64 << 20, dtype=np.uint8)

    def another_thread_ran() -> bool:
        go, ran = threading.Event(), threading.Event()

        def run() -> None:
            go.wait()
            ran.set()

        worker = threading.Thread(target=run)
        worker.start()
        go.set()
        copy(destination, source, (0, 0, 64 << 20))
        answer = ran.is_set()  # nothing since `go` gives the interpreter away, but the copy
        worker.join()
        return answer

    # It need not be quick enough each time.
    assert any(another_thread_ran() for _ in range(50))


def test_an_unknown_peer_of_the_copier() -> None:
    copier = Copier("one")
    empty = np.zeros(0, dtype=np.int64)
    with pytest.raises(RuntimeError, match="peer 0 is fenced or unknown"):
        copier.post(0, False, 0, 0, 0, 0, empty, empty, empty, 1.0)
    copier.fence(0)
    copier.close()
    copier.close()
    assert copier.drain() == []


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    # Whether one is loaded already depends on what ran before.
    with pytest.raises(RuntimeError, match=r"cannot be loaded from|cannot share the process"):
        ucx_version(str(tmp_path / "nothing.so"))


def test_the_stub_names_what_there_is() -> None:
    stub = (Path(__file__).parents[2] / "connector" / "_native.pyi").read_text(encoding="utf-8")
    public = {name for name in dir(_native) if not name.startswith("_")}
    declared = {line.split()[1].split("(")[0].rstrip(":") for line in stub.splitlines() if line[:4] in ("def ", "clas")}
    assert public == declared
    for kind in (_native.Copier, _native.UcpWorker):
        body = stub.split(f"class {kind.__name__}:")[1].split("\nclass ")[0].split("\ndef ")[0]
        methods = {line.split("def ")[1].split("(")[0] for line in body.splitlines() if "def " in line}
        assert {name for name in vars(kind) if not name.startswith("_")} == methods - {"__init__"}
