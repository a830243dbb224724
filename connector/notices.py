"""What a producer has told its consumers of finished WRITEs, until they have acknowledged."""

from __future__ import annotations

from collections.abc import Container

import msgspec

from connector.identity import EngineId
from connector.source import Notice, NoticeKind


class _Told(msgspec.Struct):
    notice: Notice
    since: float


class Notices:
    """By transfer. Bounded by the sources that are alive, and by `keep_s` after their end."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._told: dict[str, _Told] = {}

    def tell(self, transfer_id: str, consumer: EngineId, kind: NoticeKind, detail: str, now: float) -> Notice:
        """A new one; a transfer has one at most."""
        notice = Notice(transfer_id, consumer, kind, detail)
        self._told[transfer_id] = _Told(notice, now)
        return notice

    def of(self, consumer: EngineId) -> list[Notice]:
        """What this consumer has not acknowledged."""
        return [told.notice for told in self._told.values() if told.notice.consumer == consumer]

    def about(self, transfer_id: str, consumer: EngineId) -> Notice | None:
        """What was told of one transfer and not acknowledged."""
        told = self._told.get(transfer_id)
        return told.notice if told is not None and told.notice.consumer == consumer else None

    def drop(self, transfer_id: str) -> None:
        """It has been acknowledged, or nobody is left to hear it."""
        self._told.pop(transfer_id, None)

    def expire(self, now: float, alive: Container[str]) -> int:
        """Drop those that nobody has acknowledged for too long and whose source is not `alive`; how many."""
        old = [
            transfer_id
            for transfer_id, told in self._told.items()
            if now - told.since >= self._keep_s and transfer_id not in alive
        ]
        for transfer_id in old:
            del self._told[transfer_id]
        return len(old)
