"""What every transport has to do when a peer dies, hangs or is fenced, and what it gives back at the end."""

from __future__ import annotations

import gc
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from connector.errors import PeerLostError, UnreachableError
from connector.transport.base import Op
from tests.connector.far_process import SIZES, Far, Kind, digest, far_process, pattern
from tests.connector.near import Near, near_end, runs

BIG, _ = SIZES
SENTINEL = 0xA5


def big_reads(near: Near, peer: int, count: int = 12) -> list[int]:
    """Batches that take long enough to be interrupted."""
    return [near.post(peer, "read", runs((0, 0, BIG))) for _ in range(count)]


def assert_untouched_from_now_on(near: Near) -> None:
    """Nothing writes local memory any more: any copy of the far end's bytes would show."""
    near.regions.arrays[0][:] = SENTINEL
    with near_end("shm", "clock") as other:  # work that takes as long as a piece of a copy, without sleeping
        other.regions.arrays[0][:] = near.regions.arrays[0]
    assert bool((near.regions.arrays[0] == SENTINEL).all())


def descriptors() -> dict[str, str]:
    """Every open descriptor of this process, and what it is."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = os.readlink(entry)
        except FileNotFoundError:  # the one that lists them
            continue
    return found


def native_threads(name: str) -> list[Path]:
    """The tasks of this process that carry this name."""
    return [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == name]


def spent_ns(tasks: list[Path]) -> int:
    """Nanoseconds that these tasks have been running."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


class TransportFailures:
    kind: Kind

    @pytest.fixture
    def far(self) -> Iterator[Far]:
        with far_process(self.kind) as far:
            yield far

    @pytest.fixture
    def near(self) -> Iterator[Near]:
        with near_end(self.kind) as near:
            yield near

    def test_a_peer_that_dies_before_it_is_connected_to(self, far: Far, near: Near) -> None:
        far.kill()
        try:
            peer = near.transport.connect(far.description)
            batch = near.post(peer, "read", runs((0, 0, 100)))
        except (UnreachableError, PeerLostError):
            return
        (error,) = near.wait([batch], down=[peer])
        assert error is not None

    def test_a_peer_that_dies_while_nothing_is_posted(self, far: Far, near: Near) -> None:
        peer = near.transport.connect(far.description)
        assert near.wait([near.post(peer, "read", runs((0, 0, 100)))]) == [None]
        far.kill()
        near.wait(down=[peer])
        assert near.down[peer].gone
        with pytest.raises(PeerLostError):
            near.post(peer, "read", runs((0, 0, 100)))
        near.fence(peer)
        assert_untouched_from_now_on(near)

    @pytest.mark.parametrize("op", ["read", "write"])
    def test_a_peer_that_dies_with_batches_in_flight(self, far: Far, near: Near, op: Op) -> None:
        peer = near.transport.connect(far.description)
        near.wait([near.post(peer, "read", runs())])
        posted = [near.post(peer, op, runs((0, 0, BIG))) for _ in range(12)]
        far.kill()
        errors = near.wait(posted, down=[peer])
        assert errors[-1] is not None
        near.fence(peer)
        assert_untouched_from_now_on(near)

    @pytest.mark.parametrize("op", ["read", "write"])
    def test_a_batch_that_takes_longer_than_its_time(self, far: Far, near: Near, op: Op) -> None:
        peer = near.transport.connect(far.description)
        posted = [near.post(peer, op, runs((0, 0, BIG))) for _ in range(12)]
        posted.append(near.post(peer, op, runs((0, 0, BIG)), timeout_s=1e-6))
        near.wait(down=[peer])
        assert not near.down[peer].gone
        assert near.down[peer].cause == f"batch {posted[-1]} (a {op} of {BIG} bytes) was not over within 1e-06 s"
        with pytest.raises(PeerLostError):
            near.post(peer, op, runs((0, 0, 1)))
        near.fence(peer)
        near.wait(posted)  # some may have ended well before the owner has heard
        assert_untouched_from_now_on(near)

    def test_a_stopped_peer_can_be_fenced(self, far: Far, near: Near) -> None:
        peer = near.transport.connect(far.description)
        near.wait([near.post(peer, "read", runs((0, 0, 100)))])
        far.stop()
        posted = big_reads(near, peer)
        near.fence(peer)
        assert set(posted) <= set(near.completed)
        near.regions.arrays[0][:] = SENTINEL
        far.resume()
        far.digests()
        assert bool((near.regions.arrays[0] == SENTINEL).all())

    def test_a_stopped_peer_that_was_never_used_can_be_fenced(self, far: Far, near: Near) -> None:
        far.stop()
        peer = near.transport.connect(far.description)
        posted = [near.post(peer, "write", runs((0, 0, BIG))), *big_reads(near, peer, 2)]
        near.fence(peer)
        assert set(posted) <= set(near.completed)

    @pytest.mark.parametrize("op", ["read", "write"])
    def test_a_fence_ends_what_is_in_flight(self, far: Far, near: Near, op: Op) -> None:
        peer = near.transport.connect(far.description)
        near.wait([near.post(peer, "read", runs())])
        posted = [near.post(peer, op, runs((0, 0, BIG))) for _ in range(12)]
        near.fence(peer)
        assert set(posted) <= set(near.completed)
        assert near.down == {}
        # A transport may end a batch or finish it; what it says is true.
        if op == "read" and near.completed[posted[-1]] is None:
            assert np.array_equal(near.regions.arrays[0], pattern(100, BIG))
        if op == "write":
            theirs = far.digests()
            if near.completed[posted[-1]] is None:
                assert theirs[0] == digest(pattern(1, BIG))
            near.regions.arrays[0][:] = SENTINEL
            assert far.digests() == theirs
        assert_untouched_from_now_on(near)

    def test_a_write_that_completed_has_arrived(self, far: Far, near: Near) -> None:
        peer = near.transport.connect(far.description)
        posted = [near.post(peer, "write", runs((0, 0, 1 << 20))) for _ in range(40)]
        near.wait(posted[:1])
        near.fence(peer)
        assert near.completed[posted[0]] is None
        theirs = pattern(100, BIG).copy()
        theirs[: 1 << 20] = near.regions.arrays[0][: 1 << 20]
        assert far.digests()[0] == digest(theirs)

    def test_a_fence_returns_at_once_and_is_reported_once(self, far: Far, near: Near) -> None:
        peer = near.transport.connect(far.description)
        posted = big_reads(near, peer, 2)
        near.transport.fence(peer)
        with pytest.raises(PeerLostError):  # from now on, not from when it has been done
            near.post(peer, "read", runs((0, 0, 1)))
        near.transport.fence(peer)
        near.wait(posted, fenced=[peer])  # completions first, and `Near` sees to it that it comes once
        near.transport.fence(peer)
        with pytest.raises(PeerLostError):
            near.post(peer, "read", runs((0, 0, 1)))
        again = near.transport.connect(far.description)
        assert again != peer
        assert near.wait([near.post(again, "read", runs((0, 0, BIG)))]) == [None]
        assert np.array_equal(near.regions.arrays[0], pattern(100, BIG))

    def test_closing_fences_every_peer(self, far: Far, near: Near) -> None:
        idle, busy = (near.transport.connect(far.description) for _ in range(2))
        posted = big_reads(near, busy, 3)
        near.transport.close()
        near.transport.close()
        near.collect()
        assert set(posted) <= set(near.completed)
        assert near.fenced == {idle, busy}
        assert_untouched_from_now_on(near)
        near.transport.fence(busy)
        with pytest.raises(PeerLostError):
            near.post(busy, "read", runs((0, 0, 1)))
        assert near.transport.poll() == []

    def test_a_closed_transport_connects_to_nobody(self, far: Far, near: Near) -> None:
        near.transport.close()
        with pytest.raises(UnreachableError):
            near.transport.connect(far.description)

    def test_peers_do_not_disturb_each_other(self, far: Far, near: Near) -> None:
        with far_process(self.kind, seed=200) as second:
            first_peer, second_peer = (near.transport.connect(one.description) for one in (far, second))
            doomed = big_reads(near, first_peer, 6)
            fine = near.post(second_peer, "read", runs((0, 0, 1000)), region=1)
            far.kill()
            near.fence(first_peer)
            assert near.wait([*doomed, fine])[-1] is None
            assert np.array_equal(near.regions.arrays[1][:1000], pattern(201, 1000))
            assert near.wait([near.post(second_peer, "read", runs((0, 0, BIG)))]) == [None]
            assert np.array_equal(near.regions.arrays[0], pattern(200, BIG))
            assert second_peer not in near.down

    @pytest.mark.parametrize("at", ["start", "middle", "end"])
    def test_damaged_descriptions(self, far: Far, near: Near, at: str) -> None:
        whole = far.description
        place = {"start": 0, "middle": len(whole) // 2, "end": len(whole) - 1}[at]
        changed = bytes([*whole[:place], whole[place] ^ 0x55, *whole[place + 1 :]])
        for damaged in (changed, whole[:place], b""):
            with pytest.raises(UnreachableError):
                near.transport.connect(damaged)

    def test_everything_is_given_back(self, far: Far) -> None:
        def use() -> None:
            with near_end(self.kind, "leaky") as near:
                assert native_threads(f"{self.kind}-leaky")
                first = near.transport.connect(far.description)
                near.wait([near.post(first, "read", runs((0, 0, BIG)))])
                near.fence(first)
                near.transport.connect(far.description)
                with pytest.raises(UnreachableError):
                    near.transport.connect(b"nonsense")

        use()  # libraries keep a few for as long as the process lives
        gc.collect()
        before, threads = descriptors(), threading.active_count()
        for _ in range(5):
            use()
        gc.collect()
        assert sorted(descriptors().values()) == sorted(before.values())
        assert threading.active_count() == threads
        assert native_threads(f"{self.kind}-leaky") == []

    def test_an_idle_transport_costs_nothing(self, far: Far) -> None:
        with near_end(self.kind, "idle") as near:
            peer = near.transport.connect(far.description)
            near.wait([near.post(peer, "read", runs((0, 0, BIG)))])
            tasks = native_threads(f"{self.kind}-idle")
            before = spent_ns(tasks)
            readable = select.poll()
            readable.register(near.transport.fileno(), select.POLLIN)
            assert readable.poll(1000) == []
            assert spent_ns(tasks) - before < 200_000_000
