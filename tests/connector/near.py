"""The near end of a transport: two regions, and a collector of what is reported."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from connector.transport.base import Completed, Op, PeerDown, Runs, Transport
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

    def post(self, peer: int, op: Op, batch: Runs, region: int = 0, timeout_s: float = PATIENCE_S) -> int:
        """Between regions of the same number."""
        return self.transport.post(peer, op, region, region, batch, timeout_s)

    def collect(self) -> None:
        """What is there to be polled."""
        for event in self.transport.poll():
            if isinstance(event, Completed):
                assert event.batch not in self.completed, f"batch {event.batch} completed twice"
                self.completed[event.batch] = event.error
            else:
                assert isinstance(event, PeerDown)
                assert event.peer not in self.down, f"peer {event.peer} is down twice"
                self.down[event.peer] = event

    def wait(self, batches: Iterable[int] = (), down: Iterable[int] = ()) -> list[str | None]:
        """Until the batches have completed and the peers are down; the batches' errors."""
        wanted, lost = list(batches), list(down)
        readable = select.poll()
        readable.register(self.transport.fileno(), select.POLLIN)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.collect()
            if all(batch in self.completed for batch in wanted) and all(peer in self.down for peer in lost):
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
