"""Ended transfers, remembered so that late and repeated messages are told apart from early ones. Bounded."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from connector.identity import EngineId
from connector.source import EDGES, Source, SourceState

MAX_REMEMBERED = 8192


class Remembered(msgspec.Struct, frozen=True):
    """How a source ended, and which ranks had acknowledged."""

    state: SourceState
    consumer: EngineId
    ranks: frozenset[int]
    story: str


class EndedSources:
    """The last `limit` of them."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._ended: OrderedDict[str, Remembered] = OrderedDict()

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._ended

    def get(self, transfer_id: str) -> Remembered | None:
        """The end of a transfer, if it is remembered."""
        return self._ended.get(transfer_id)

    def add(self, source: Source) -> None:
        """A source has ended."""
        self._ended[source.transfer_id] = Remembered(
            source.state, source.consumer, frozenset(source.acks), source.tell()
        )
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def validate(self, is_parked: object) -> None:
        """Check the bound, and that what is here has ended; for tests."""
        assert len(self._ended) <= self._limit
        for transfer_id, ended in self._ended.items():
            assert ended.state not in EDGES, ended.story
            assert transfer_id not in is_parked, f"ended and parked: {ended.story}"  # type: ignore[operator]
