"""The near end of a transport: two regions, and a collector of what is reported."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from connector.transport.base import Completed, Fenced, Op, PeerDown, Runs, Transport
from tests.connector.far_process import Kind, Regions, make_transport

PATIENCE_S = 60.0
"""How long a test waits for anything at all; nothing is asserted about time."""


def runs(*each: tuple[int, int, int]) -> Runs:
    """Runs of (local, remote, length)."""
    table = np.array(each, dtype=np.int64).reshape(-1, 3)
    local, remote, length = (np.ascontiguousarray(table[:, column]) for column in range(3))
    return Runs(local=local, remote=remote, length=length)


class Near:
    """A transport with both regions registered. Every event is checked to come once."""

    def __init__(self, kind: Kind, name: str = "near", seed: int = 1) -> None:
        self.regions = Regions(seed)
        self.transport: Transport = make_transport(kind, name)
        for memory in self.regions.memories:
            self.transport.register(memory)
        self.completed: dict[int, str | None] = {}
        self.down: dict[int, PeerDown] = {}
        self.fenced: set[int] = set()
        self._peers: dict[int, int] = {}

    def post(self, peer: int, op: Op, batch: Runs, region: int = 0, timeout_s: float = PATIENCE_S) -> int:
        """Between regions of the same number."""
        batch_number = self.transport.post(peer, op, region, region, batch, timeout_s)
        self._peers[batch_number] = peer
        return batch_number

    def collect(self) -> None:
        """What is there to be polled."""
        for event in self.transport.poll():
            if isinstance(event, Completed):
                assert event.batch not in self.completed, f"batch {event.batch} completed twice"
                assert self._peers.get(event.batch) not in self.fenced, f"batch {event.batch} completed after the fence"
                self.completed[event.batch] = event.error
            elif isinstance(event, Fenced):
                assert event.peer not in self.fenced, f"peer {event.peer} is fenced twice"
                self.fenced.add(event.peer)
            else:
                assert isinstance(event, PeerDown)
                assert event.peer not in self.fenced, f"peer {event.peer} is down after the fence"
                assert event.peer not in self.down, f"peer {event.peer} is down twice"
                self.down[event.peer] = event

    def fence(self, peer: int) -> None:
        """Fence a peer and wait for it; all of its batches have completed then."""
        self.transport.fence(peer)
        self.wait(fenced=[peer])
        assert {batch for batch, owner in self._peers.items() if owner == peer} <= set(self.completed)

    def wait(
        self, batches: Iterable[int] = (), down: Iterable[int] = (), fenced: Iterable[int] = ()
    ) -> list[str | None]:
        """Until the batches have completed and the peers are down or fenced; the batches' errors."""
        wanted, lost, gone = list(batches), list(down), list(fenced)
        readable = select.poll()
        readable.register(self.transport.fileno(), select.POLLIN)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.collect()
            known = all(batch in self.completed for batch in wanted) and all(peer in self.down for peer in lost)
            if known and self.fenced.issuperset(gone):
                return [self.completed[batch] for batch in wanted]
            left = deadline - time.monotonic()
            assert left > 0, f"of {wanted} only {sorted(self.completed)} completed; down: {self.down}"
            readable.poll(left * 1000)

    def close(self) -> None:
        """The transport, then the memory."""
        self.transport.close()
        self.regions.close()


@contextmanager
def near_end(kind: Kind, name: str = "near") -> Iterator[Near]:
    """A near end that is closed afterwards."""
    near = Near(kind, name)
    try:
        yield near
    finally:
        near.close()
