"""What a consumer said of a transfer before its request arrived: two connections, no order between them.

An ACK is parked, bounded in count and age; that one is lost costs at most a lease. A cancellation of a WRITE is another
matter: the consumer frees its blocks on the answer, so a request that came later and was served would write into blocks
of somebody else. It is therefore never forgotten within `cancels_s`, which no request may outlive; what there is no
room for is not answered, and the consumer keeps its blocks and asks again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import msgspec

from connector.identity import EngineId

MAX_PARKED = 1024
MAX_CANCELS = 65536
CANCELS_REMEMBERED_S = 900.0
"""Seconds. A `Prefill` call whose destinations are written has a shorter deadline."""


class Parked(msgspec.Struct):
    """ACKs of one transfer: rank -> outcome."""

    consumer: EngineId
    world_size: int
    acks: dict[int, str]
    since: float


class Early:
    """See the module. Times are seconds of the caller's monotonic clock."""

    def __init__(
        self,
        counters: Counter[str],
        *,
        acks_s: float,
        max_parked: int = MAX_PARKED,
        cancels_s: float = CANCELS_REMEMBERED_S,
        max_cancels: int = MAX_CANCELS,
    ) -> None:
        self._counters = counters
        self._acks_s = acks_s
        self._max_parked = max_parked
        self._cancels_s = cancels_s
        self._max_cancels = max_cancels
        self._parked: OrderedDict[str, Parked] = OrderedDict()
        self._cancelled: OrderedDict[tuple[str, EngineId], float] = OrderedDict()

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._parked

    def ack(self, transfer_id: str, consumer: EngineId, rank: int, world_size: int, outcome: str, now: float) -> str:
        """Park an ACK; returns its status."""
        parked = self._parked.get(transfer_id)
        if parked is None:
            if len(self._parked) == self._max_parked:
                _, dropped = self._parked.popitem(last=False)
                self._counters["acks_dropped"] += len(dropped.acks)
            parked = self._parked[transfer_id] = Parked(consumer, world_size, {}, now)
        elif parked.consumer != consumer:
            return "stale"
        elif parked.world_size != world_size:
            return "invalid"
        elif rank in parked.acks:
            return "duplicate"
        parked.acks[rank] = outcome
        return "parked"

    def cancel(self, transfer_id: str, consumer: EngineId, now: float) -> bool:
        """Remember a cancellation; False when there is no room to keep it long enough."""
        self._forget_cancels(now)
        key = transfer_id, consumer
        if key not in self._cancelled and len(self._cancelled) >= self._max_cancels:
            self._counters["cancels_refused"] += 1
            return False
        self._cancelled[key] = now
        self._cancelled.move_to_end(key)
        return True

    def cancelled(self, transfer_id: str, consumer: EngineId) -> bool:
        """Whether the consumer has cancelled it; it stays so."""
        return (transfer_id, consumer) in self._cancelled

    def take(self, transfer_id: str) -> Parked | None:
        """The parked ACKs of a transfer, which are not parked any more."""
        return self._parked.pop(transfer_id, None)

    def expire(self, now: float) -> None:
        """Drop what nothing came for."""
        self._forget_cancels(now)
        while self._parked:
            transfer_id, parked = next(iter(self._parked.items()))
            if now - parked.since < self._acks_s:
                return
            del self._parked[transfer_id]
            self._counters["acks_unknown"] += len(parked.acks)

    def validate(self) -> None:
        """Check the bounds; for tests."""
        assert len(self._parked) <= self._max_parked
        assert len(self._cancelled) <= self._max_cancels

    def _forget_cancels(self, now: float) -> None:
        while self._cancelled:
            key, since = next(iter(self._cancelled.items()))
            if now - since < self._cancels_s:
                return
            del self._cancelled[key]
