"""What every transport has to do, between real processes. A transport's test inherits this and names its kind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from connector.errors import OutOfBoundsError, PeerLostError
from connector.transport.base import Op, Runs
from tests.connector.far_process import SIZES, Far, Kind, Regions, digest, far_process, pattern
from tests.connector.near import PATIENCE_S, Near, near_end, runs

BIG, SMALL = SIZES
TOO_FAR = 2**63 - 1


class TransportConformance:
    kind: Kind

    @pytest.fixture
    def far(self) -> Iterator[Far]:
        with far_process(self.kind) as far:
            yield far

    @pytest.fixture
    def near(self) -> Iterator[Near]:
        with near_end(self.kind) as near:
            yield near

    @pytest.mark.parametrize(
        "batch",
        [
            runs(),
            runs((5, 9, 0)),
            runs((BIG, BIG, 0)),
            runs((0, 0, 1)),
            runs((BIG - 1, 0, 1), (0, BIG - 1, 1)),
            runs((13, 7, 3), (1 << 20, (2 << 20) + 1, 4097)),
            runs((4096, 8192, 4096)),
            runs((1, 3, (32 << 20) + 5)),
            runs((0, 0, BIG)),
        ],
        ids=["empty", "of nothing", "nothing at the end", "byte", "last bytes", "unaligned", "page", "large", "all"],
    )
    def test_reads_and_writes(self, far: Far, near: Near, batch: Runs) -> None:
        peer = near.transport.connect(far.description)
        mine, theirs = pattern(1, BIG).copy(), pattern(100, BIG).copy()
        for local, remote, length in zip(batch.local, batch.remote, batch.length, strict=True):
            mine[local : local + length] = theirs[remote : remote + length]
        assert near.wait([near.post(peer, "read", batch)]) == [None]
        assert np.array_equal(near.regions.arrays[0], mine)
        near.regions.arrays[0][:] = mine = pattern(55, BIG)
        for local, remote, length in zip(batch.local, batch.remote, batch.length, strict=True):
            theirs[remote : remote + length] = mine[local : local + length]
        assert near.wait([near.post(peer, "write", batch)]) == [None]
        assert far.digests() == [digest(theirs), digest(pattern(101, SMALL))]
        assert np.array_equal(near.regions.arrays[0], mine)

    @pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
    def test_scattered_and_adjacent_runs(self, far: Far, near: Near, shuffled: bool) -> None:
        peer = near.transport.connect(far.description)
        chance = np.random.default_rng(4)
        page, count = 1024, SMALL // 1024
        local, remote = np.arange(count), np.arange(count)
        # Stretches that are adjacent on both sides, on one side only, and on none.
        remote[8:16] = remote[8:16][::-1].copy()
        remote[24:40] = np.roll(remote[24:40], 5)
        order = chance.permutation(count) if shuffled else np.arange(count)
        length = np.full(count, page, dtype=np.int64)
        length[::7] = page - 1
        length[3] = 0
        batch = Runs(local=(local * page)[order], remote=(remote * page)[order], length=length[order])
        mine, theirs = pattern(2, SMALL).copy(), pattern(101, SMALL)
        for one, other, size in zip(local * page, remote * page, length, strict=True):
            mine[one : one + size] = theirs[other : other + size]
        assert near.wait([near.post(peer, "read", batch, region=1)]) == [None]
        assert np.array_equal(near.regions.arrays[1], mine)

    def test_many_batches_at_once(self, far: Far, near: Near) -> None:
        peer = near.transport.connect(far.description)
        theirs, mine = pattern(100, BIG).copy(), pattern(1, BIG).copy()
        size, step = 10_007, 40_960
        posted = []
        for number in range(1000):
            at, op = number * step, ("read", "write")[number % 2]
            posted.append(near.post(peer, op, runs((at, at + 11, size), (at + size, at + size + 19, 77))))  # type: ignore[arg-type]
            source, target = (theirs, mine) if op == "read" else (mine, theirs)
            for local, remote, length in ((at, at + 11, size), (at + size, at + size + 19, 77)):
                here, there = (local, remote) if op == "read" else (remote, local)
                target[here : here + length] = source[there : there + length]
        assert len(set(posted)) == 1000
        assert set(near.wait(posted)) == {None}
        assert np.array_equal(near.regions.arrays[0], mine)
        assert far.digests()[0] == digest(theirs)

    def test_memory_that_is_registered_twice(self, far: Far, near: Near) -> None:
        again = [near.transport.register(memory) for memory in near.regions.memories]
        assert again == [2, 3]
        peer = near.transport.connect(far.description)
        posted = [near.transport.post(peer, "read", region, 1, runs((0, 8, 4096)), PATIENCE_S) for region in (1, 3)]
        assert near.wait(posted) == [None, None]
        assert np.array_equal(near.regions.arrays[1][:4096], pattern(101, SMALL)[8:4104])
        with near_end(self.kind, "third") as third:
            # Both numbers are the same bytes to those who connect now.
            back = third.transport.connect(near.transport.describe())
            read = third.transport.post(back, "read", 1, 3, runs((0, 0, 4096)), PATIENCE_S)
            assert third.wait([read]) == [None]
            assert np.array_equal(third.regions.arrays[1][:4096], near.regions.arrays[1][:4096])

    def test_memory_that_is_registered_after_others_have_connected(self, far: Far, near: Near) -> None:
        extra = Regions(seed=300)
        try:
            with near_end(self.kind, "third") as third:
                early = third.transport.connect(near.transport.describe())
                number = near.transport.register(extra.memories[1])
                near_peer = near.transport.connect(far.description)
                into = near.transport.post(near_peer, "read", number, 1, runs((0, 0, 4096)), PATIENCE_S)
                assert near.wait([into]) == [None]
                with pytest.raises(OutOfBoundsError, match=r"no .*region"):
                    third.transport.post(early, "read", 1, number, runs((0, 0, 1)), PATIENCE_S)
                late = third.transport.connect(near.transport.describe())
                read = third.transport.post(late, "read", 1, number, runs((0, 0, 4096)), PATIENCE_S)
                assert third.wait([read]) == [None]
                assert np.array_equal(third.regions.arrays[1][:4096], pattern(101, SMALL)[:4096])
                assert third.wait([third.post(early, "read", runs((0, 0, 4096)))]) == [None]
        finally:
            near.transport.close()
            extra.close()

    @pytest.mark.parametrize("op", ["read", "write"])
    @pytest.mark.parametrize(
        "bad",
        [
            (0, 0, SMALL + 1),
            (1, 0, SMALL),
            (0, 1, SMALL),
            (SMALL, 0, 1),
            (0, SMALL, 1),
            (SMALL + 1, 0, 0),
            (-1, 0, 1),
            (0, -1, 1),
            (0, 0, -1),
            (TOO_FAR, 0, 2),
            (0, TOO_FAR, 2),
            (2, 2, TOO_FAR),
            (TOO_FAR, TOO_FAR, TOO_FAR),
            (-TOO_FAR - 1, 0, 1),
            (0, 0, -TOO_FAR - 1),
        ],
    )
    def test_nothing_is_posted_of_a_batch_that_leaves_a_region(
        self, shared: tuple[Far, Near, int], op: Op, bad: tuple[int, int, int]
    ) -> None:
        far, near, peer = shared
        before, theirs = digest(near.regions.arrays[1]), far.digests()
        with pytest.raises(OutOfBoundsError, match="nothing was posted"):
            near.post(peer, op, runs((0, 0, 16), bad), region=1)
        near.wait([near.post(peer, "read", runs())])
        assert (digest(near.regions.arrays[1]), far.digests()) == (before, theirs)

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls) -> Iterator[tuple[Far, Near, int]]:
        with far_process(cls.kind) as far, near_end(cls.kind) as near:
            yield far, near, near.transport.connect(far.description)

    @pytest.mark.parametrize(("local", "remote"), [(-1, 0), (2, 0), (0, -1), (0, 2)])
    def test_unknown_regions(self, shared: tuple[Far, Near, int], local: int, remote: int) -> None:
        _, near, peer = shared
        with pytest.raises(OutOfBoundsError, match="nothing was posted"):
            near.transport.post(peer, "read", local, remote, runs((0, 0, 1)), PATIENCE_S)

    @pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
    def test_a_time_that_has_passed_already(self, shared: tuple[Far, Near, int], timeout_s: float) -> None:
        _, near, peer = shared
        with pytest.raises(ValueError, match="must be a positive number of seconds"):
            near.post(peer, "read", runs((0, 0, 1)), timeout_s=timeout_s)

    def test_a_time_without_end(self, shared: tuple[Far, Near, int]) -> None:
        _, near, peer = shared
        assert near.wait([near.post(peer, "read", runs((0, 0, 1)), timeout_s=float("inf"))]) == [None]

    @pytest.mark.parametrize("peer", [-1, 77])
    def test_unknown_peers(self, shared: tuple[Far, Near, int], peer: int) -> None:
        _, near, _ = shared
        with pytest.raises(PeerLostError):
            near.post(peer, "read", runs((0, 0, 1)))
        near.transport.fence(peer)
