"""The consumer's state machine of one producer: is it there, and when is it tried again?

    LINKED ◄──heard── SUSPECT            3 heartbeats without an answer: it gets no new work
      │  └──────silent──► │
      └──lost, 10 heartbeats silent──► LOST ──due──► DIALLING ──linked──► LINKED
                                         ▲──refused, doubling──┘
    any ──another incarnation, known exit, closed──► GONE

Heartbeats are counted, not seconds: a consumer that is itself held up has not asked, and hears what has come meanwhile
before it asks again. A worker is never given up for being slow or unreachable: it is tried again after 1 s, doubling
to 60 s, for ever. It is gone only when another incarnation answers in its place, its process is known to have ended, or
its owner drops it; what comes back then is a new peer. Events come in with the time, instructions go out; there is no
I/O and no clock.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TypeAlias

import msgspec

from connector.errors import InvalidTransition

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
SUSPECT_AFTER = 3
LOST_AFTER = 10
"""Heartbeats without an answer."""


class PeerState(StrEnum):
    """See the module's drawing."""

    LINKED = "linked"
    SUSPECT = "suspect"
    LOST = "lost"
    DIALLING = "dialling"
    GONE = "gone"


EDGES = {
    PeerState.LINKED: {PeerState.SUSPECT, PeerState.LOST, PeerState.GONE},
    PeerState.SUSPECT: {PeerState.LINKED, PeerState.LOST, PeerState.GONE},
    PeerState.LOST: {PeerState.DIALLING, PeerState.GONE},
    PeerState.DIALLING: {PeerState.LINKED, PeerState.LOST, PeerState.GONE},
    PeerState.GONE: set[PeerState](),
}


class DropControl(msgspec.Struct, frozen=True):
    """Instruction: the control connection is of no use any more; drop it, then say `lost`."""

    cause: str


class DialAt(msgspec.Struct, frozen=True):
    """Instruction: shake hands again at this time; say `dialling` then."""

    when: float


Instruction: TypeAlias = DropControl | DialAt


class Peer:
    """One incarnation of a producer, LINKED. Times are seconds of the caller's monotonic clock."""

    def __init__(self, name: str, now: float) -> None:
        self.state = PeerState.LINKED
        self._name = name
        self._unanswered = 0
        self._retry_s = FIRST_RETRY_S
        self._story: deque[str] = deque([f"linked at {now:.3f}"], maxlen=16)

    def tell(self) -> str:
        """What has happened to it, for error messages."""
        return "; ".join(self._story)

    @property
    def usable(self) -> bool:
        """Whether it may be given new work."""
        return self.state is PeerState.LINKED

    def heard(self, now: float) -> None:
        """Something has come from it."""
        self._unanswered = 0
        if self.state is PeerState.SUSPECT:
            self._move(PeerState.LINKED, f"heard again at {now:.3f}")

    def asked(self, now: float) -> list[Instruction]:
        """A heartbeat is due: it is about to be asked for a sign of life once more."""
        if self.state is PeerState.LINKED and self._unanswered >= SUSPECT_AFTER:
            self._move(PeerState.SUSPECT, f"{self._unanswered} heartbeats without an answer at {now:.3f}")
        if self.state is PeerState.SUSPECT and self._unanswered >= LOST_AFTER:
            return [DropControl(f"{self._name} has not answered {self._unanswered} heartbeats")]
        self._unanswered += 1
        return []

    def data_lost(self, cause: str) -> list[Instruction]:
        """Its data connection is down: a new handshake makes a new one."""
        if self.state in (PeerState.LINKED, PeerState.SUSPECT):
            return [DropControl(f"its data connection is down ({cause})")]
        return []

    def lost(self, cause: str, now: float) -> list[Instruction]:
        """The control connection is gone. Changes nothing for one that is gone for good."""
        if self.state is PeerState.GONE:
            return []
        self._retry_s = FIRST_RETRY_S
        return self._again(cause, now)

    def dialling(self, now: float) -> None:
        """A handshake has begun."""
        self._move(PeerState.DIALLING, f"dialled at {now:.3f}")

    def refused(self, cause: str, now: float) -> list[Instruction]:
        """The handshake has failed."""
        if self.state is PeerState.GONE:
            return []
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        return self._again(cause, now)

    def linked(self, now: float) -> None:
        """The handshake has succeeded."""
        self._unanswered = 0
        self._move(PeerState.LINKED, f"linked again at {now:.3f}")

    def gone(self, cause: str, now: float) -> None:
        """It will not come back. Twice is harmless."""
        if self.state is not PeerState.GONE:
            self._move(PeerState.GONE, f"gone at {now:.3f}: {cause}")

    def _again(self, cause: str, now: float) -> list[Instruction]:
        self._move(PeerState.LOST, f"lost at {now:.3f}: {cause}")
        return [DialAt(now + self._retry_s)]

    def _move(self, to: PeerState, story: str) -> None:
        if to not in EDGES[self.state]:
            raise InvalidTransition(f"{self._name} is {self.state}, not to become {to}: {self.tell()}")
        self.state = to
        self._story.append(story)
