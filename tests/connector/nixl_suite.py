"""NIXL between processes. `test_nixl.py` runs this in a process of its own, where no other UCX has been loaded."""

from __future__ import annotations

import gc
import hashlib
import os
import select
import signal
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from connector.errors import RegistrationError, TransportError, UnreachableError
from connector.transport.base import Memory
from tests.connector.far_process import far_process
from tests.connector.near import Near, near_end, runs
from tests.connector.transport_conformance import TransportConformance
from tests.connector.transport_failures import TransportFailures


class TestConformance(TransportConformance):
    kind = "nixl"


class TestFailures(TransportFailures):
    kind = "nixl"


def changed(description: bytes, **changes: object) -> bytes:
    """The description with changes that its digest agrees with."""
    body = {**msgspec.msgpack.decode(msgspec.msgpack.decode(description)["body"]), **changes}
    encoded = msgspec.msgpack.encode(body)
    return msgspec.msgpack.encode({"body": encoded, "digest": hashlib.blake2b(encoded, digest_size=16).digest()})


class TestNixl:
    @pytest.fixture
    def near(self) -> Iterator[Near]:
        with near_end("nixl") as near:
            yield near

    def test_a_process_reaches_itself(self, near: Near) -> None:
        peer = near.transport.connect(near.transport.describe())
        assert near.wait([near.transport.post(peer, "read", 0, 1, runs((0, 0, 4096)), 60.0)]) == [None]
        assert np.array_equal(near.regions.arrays[0][:4096], near.regions.arrays[1][:4096])

    def test_memory_that_cannot_be_registered(self, near: Near) -> None:
        with pytest.raises(RegistrationError, match=r"memory at 0x0 .4096 bytes. cannot be registered"):
            near.transport.register(Memory(address=0, length=4096, fd=None))

    def test_a_closed_transport_registers_and_describes_nothing(self, near: Near) -> None:
        near.transport.close()
        with pytest.raises(RegistrationError, match="is closed"):
            near.transport.register(near.regions.memories[0])
        with pytest.raises(TransportError, match="is closed"):
            near.transport.describe()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"version": "1.5.0"}, "the peer uses NIXL 1.5.0, this worker 1.5.1; each brings a UCX of its own"),
            ({"started": 1}, "is not the peer any more; it has ended"),
            ({"pid": 2**22 + 1}, "cannot be watched"),
            ({"pid": -1}, "cannot be watched"),
            ({"metadata": b""}, "cannot be reached over nixl"),
            ({"regions": [(-1, 5)]}, "description is damaged"),
            ({"regions": [(0, 2**62)]}, "description is damaged"),
        ],
    )
    def test_descriptions_that_reach_nobody(self, near: Near, changes: dict[str, object], message: str) -> None:
        description = changed(near.transport.describe(), **changes)
        open_descriptors = []
        for _ in range(2):  # UCX keeps a few for as long as the process lives
            with pytest.raises(UnreachableError, match=message):
                near.transport.connect(description)
            gc.collect()
            open_descriptors.append(len(os.listdir("/proc/self/fd")))
        assert open_descriptors[1] <= open_descriptors[0]

    def test_a_peer_whose_process_cannot_be_watched(self, near: Near) -> None:
        with far_process("nixl") as far:
            host = {"boot_id": "another", "pid_namespace": 1}
            peer = near.transport.connect(changed(far.description, host=host, pid=1))
            assert near.wait([near.post(peer, "read", runs((0, 0, 4096)))]) == [None]
            far.kill()
            (error,) = near.wait([near.post(peer, "read", runs((0, 0, 4096)))], down=[peer])
            assert error is not None

    def test_a_process_that_has_ended_but_was_not_reaped(self, near: Near) -> None:
        with far_process("nixl") as far:
            os.kill(far.pid, signal.SIGKILL)
            os.waitid(os.P_PID, far.pid, os.WEXITED | os.WNOWAIT)
            try:
                peer = near.transport.connect(far.description)
            except UnreachableError:
                return
            near.wait(down=[peer])

    def test_the_whole_process_is_idle_while_nothing_is_posted(self, near: Near) -> None:
        with far_process("nixl") as far:
            peer = near.transport.connect(far.description)
            near.wait([near.post(peer, "read", runs((0, 0, 4096)))])
            readable = select.poll()
            readable.register(near.transport.fileno(), select.POLLIN)
            before = time.process_time_ns()
            assert readable.poll(1000) == []
            assert time.process_time_ns() - before < 100_000_000
