"""The fabric's own promises: a test that leans on it proves no more than it does."""

from __future__ import annotations

import select

import numpy as np
import pytest

from connector import OutOfBoundsError, PeerLostError, UnreachableError
from connector.transport.base import Completed, Fenced, PeerDown, Runs
from tests.connector.fabric import Fabric, FabricTransport
from tests.connector.pool import Pool


class Ends:
    """Two ends with a pool each; the near one has taken its first two blocks."""

    def __init__(self, automatic: bool = False) -> None:
        self.fabric = Fabric(automatic)
        self.near_pool, self.far_pool = Pool(4), Pool(4)
        self.near = self._end("near", self.near_pool)
        self.far = self._end("far", self.far_pool)
        self.peer = self.near.connect(self.far.describe())
        self.size = self.near_pool.block_bytes
        self.near_pool.custody.take(0, 2 * self.size)
        self.far_pool.fill([0, 1, 2, 3], seed=5)

    def _end(self, name: str, pool: Pool) -> FabricTransport:
        end = self.fabric.transport(name, pool.custody)
        end.register(pool.memory)
        return end

    def read(self, *blocks: int) -> int:
        """READ these blocks of the far pool into the same ones of the near pool."""
        offsets = np.array(blocks, dtype=np.int64) * self.size
        runs = Runs(local=offsets, remote=offsets, length=np.full(len(blocks), self.size, dtype=np.int64))
        return self.near.post(self.peer, "read", 0, 0, runs, timeout_s=30.0)


@pytest.fixture
def ends() -> Ends:
    return Ends()


def readable(end: FabricTransport) -> bool:
    return bool(select.select([end.fileno()], [], [], 0)[0])


def test_bytes_move_run_by_run(ends: Ends) -> None:
    batch = ends.read(0, 1)
    (posted,) = ends.fabric.in_flight
    posted.move(1)
    assert np.array_equal(ends.near_pool.block(0), ends.far_pool.block(0))
    assert not ends.near_pool.block(1).any()
    assert not readable(ends.near)
    posted.succeed()
    assert readable(ends.near)
    assert ends.near.poll() == [Completed(batch=batch, error=None)]
    assert not readable(ends.near)
    assert np.array_equal(ends.near_pool.block(1), ends.far_pool.block(1))


def test_an_automatic_batch_completes_when_it_is_posted() -> None:
    ends = Ends(automatic=True)
    batch = ends.read(0)
    assert ends.near.poll() == [Completed(batch=batch, error=None)]


def test_a_write_without_an_owner_is_noticed(ends: Ends) -> None:
    ends.read(2)
    ends.fabric.in_flight[0].move()
    assert len(ends.near_pool.custody.violations) == 1


def test_an_error_and_a_death_stop_nothing_but_a_fence_does(ends: Ends) -> None:
    batch = ends.read(0, 1)
    (posted,) = ends.fabric.in_flight
    ends.fabric.kill("far")
    assert ends.near.poll() == [PeerDown(peer=ends.peer, cause="far was killed by the script", gone=True)]
    posted.move(1)
    assert ends.near_pool.block(0).any()
    ends.near.fence(ends.peer)
    posted.move()
    assert not ends.near_pool.block(1).any()
    assert ends.near.poll() == [Completed(batch=batch, error="fenced"), Fenced(peer=ends.peer)]
    with pytest.raises(PeerLostError):
        ends.read(0)
    with pytest.raises(UnreachableError):
        ends.near.connect(ends.far.describe())


def test_a_fence_stops_nothing_before_it_has_ended(ends: Ends) -> None:
    ends.fabric.automatic_fences = False
    batch = ends.read(0, 1)
    (posted,) = ends.fabric.in_flight
    ends.near.fence(ends.peer)
    with pytest.raises(PeerLostError, match="being fenced"):
        ends.read(0)
    posted.move(1)
    assert np.array_equal(ends.near_pool.block(0), ends.far_pool.block(0))
    assert ends.near.poll() == []
    ends.near.finish_fence(ends.peer)
    ends.near.finish_fence(ends.peer)
    assert ends.near.poll() == [Completed(batch=batch, error="fenced"), Fenced(peer=ends.peer)]


def test_a_batch_that_outlives_its_time_makes_its_peer_late_once(ends: Ends) -> None:
    ends.read(0)
    ends.read(1)
    for posted in ends.fabric.in_flight:
        posted.outlive()
    (down,) = ends.near.poll()
    assert down == PeerDown(peer=ends.peer, cause="batch 1 was not over within 30 s", gone=False)
    with pytest.raises(PeerLostError):
        ends.read(0)


def test_a_batch_that_leaves_its_region_is_not_posted(ends: Ends) -> None:
    with pytest.raises(OutOfBoundsError):
        ends.read(0, 4)
    assert ends.fabric.in_flight == []


def test_what_is_lost_is_never_reported_and_what_is_repeated_is(ends: Ends) -> None:
    ends.read(0)
    repeated = ends.read(1)
    first, second = ends.fabric.in_flight
    first.lose()
    second.succeed()
    second.repeat()
    ends.near.fence(ends.peer)
    assert [event.batch for event in ends.near.poll() if isinstance(event, Completed)] == [repeated, repeated]
