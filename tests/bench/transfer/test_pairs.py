"""Contenders' processes: they are told apart from what they cannot do, and are gone afterwards."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from bench.errors import ContenderFailed
from bench.transfer import process
from bench.transfer.contender import CONTENDERS
from bench.transfer.memory import MappedMemory, check_pattern, write_pattern
from bench.transfer.pairs import open_pairs
from bench.transfer.side import Side

PAGE = 4096
PAGES = np.array([2, 0], dtype=np.int32)

pytestmark = pytest.mark.process


@pytest.fixture
def memories() -> Iterator[tuple[MappedMemory, MappedMemory]]:
    here, there = (MappedMemory.create(name, 4 * PAGE) for name in ("here", "there"))
    yield here, there
    here.close()
    there.close()


def test_a_write_moves_the_bytes_and_its_notice_comes_after(memories: tuple[MappedMemory, MappedMemory]) -> None:
    here, there = memories
    write_pattern(here, PAGE, PAGES, seed=3)
    with open_pairs([CONTENDERS["shm"]], here, there, os.environ) as ([pair], missing):
        assert missing == {}
        pair.prepare(PAGE)
        sample = pair.operate("write", PAGES, PAGES[::-1].copy())
    check_pattern(there, PAGE, PAGES[::-1], 3, "shm")
    assert sample.notified_us is not None
    assert sample.notified_us > sample.done_us > 0


def test_a_process_that_dies_is_told_and_the_others_are_ended(memories: tuple[MappedMemory, MappedMemory]) -> None:
    here, there = memories
    with open_pairs([CONTENDERS["shm"]], here, there, os.environ) as ([pair], _):
        initiator, target = pair.pids
        os.kill(initiator, signal.SIGKILL)
        with pytest.raises(ContenderFailed, match=r"shm \(initiator\) ended by itself with code -9"):
            pair.prepare(PAGE)
    for pid in (initiator, target):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_a_contender_fails_with_is_told_with_its_log(memories: tuple[MappedMemory, MappedMemory]) -> None:
    side = Side("memcpy", "initiator", *memories, os.environ)
    try:
        side.ready()
        side.ask(process.AwaitNotice(1), process.Done)
        with pytest.raises(ContenderFailed, match=r"failed: BenchError: memcpy has nobody to tell[\s\S]*Traceback"):
            side.hear(process.Noticed)
    finally:
        side.close()
