"""One source as its producer sees it: states, edges, and what a change of state asks for.

READ    COMPUTING ──hold──► HELD ──last ACK──► RELEASED
            │                 └──lease over──► EXPIRED
            └──cannot compute, lease over, nobody wants it any more──► FAILED

WRITE   COMPUTING ──first post──► PUSHING ──all of it has arrived──► FLUSHED ──last ACK──► RELEASED
            │                        │                                 └──lease over──► EXPIRED
            └─────────► FAILED ◄─────┴──► STOPPING, until the last posted operation is terminal

From HELD on the blocks belong to the transfer until its end. In a WRITE they belong to it until FLUSHED or FAILED: no
operation is in flight any more, and what is left to do is to tell the consumer, until it says that it has heard.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec

from connector.identity import EngineId
from connector.imports import BatchKey, PeerKey
from connector.lease import Lease


class SourceState(StrEnum):
    """See the module's drawing."""

    COMPUTING = "computing"
    HELD = "held"
    PUSHING = "pushing"
    STOPPING = "stopping"
    FLUSHED = "flushed"
    RELEASED = "released"
    EXPIRED = "expired"
    FAILED = "failed"


EDGES = {
    SourceState.COMPUTING: {SourceState.HELD, SourceState.PUSHING, SourceState.FAILED},
    SourceState.HELD: {SourceState.RELEASED, SourceState.EXPIRED},
    SourceState.PUSHING: {SourceState.FLUSHED, SourceState.STOPPING},
    SourceState.STOPPING: {SourceState.FAILED},
    SourceState.FLUSHED: {SourceState.RELEASED, SourceState.EXPIRED},
}

AckStatus = Literal["accepted", "duplicate", "parked", "stale", "invalid"]
RenewStatus = Literal["renewed", "unknown", "ended"]
NoticeKind = Literal["commit", "failed", "stopped"]
Outcome = Literal["released", "expired", "failed", "flushed"]
ENDS: dict[SourceState, Outcome] = {
    SourceState.RELEASED: "released",
    SourceState.EXPIRED: "expired",
    SourceState.FAILED: "failed",
}


class Ended(msgspec.Struct, frozen=True):
    """Instruction: the source needs its blocks no more; abort its computation, or free them. Comes once."""

    transfer_id: str
    outcome: Outcome
    detail: str
    age_s: float


class Stop(msgspec.Struct, frozen=True):
    """Instruction: stop computing and posting; `Ended` follows when nothing is in flight any more."""

    transfer_id: str
    detail: str


class Notice(msgspec.Struct, frozen=True):
    """Instruction: tell the consumer how its WRITE ended, until it has acknowledged."""

    transfer_id: str
    consumer: EngineId
    kind: NoticeKind
    detail: str


class LongHeld(msgspec.Struct, frozen=True):
    """Instruction: warn that blocks are held unusually long by a consumer that is alive."""

    transfer_id: str
    consumer: EngineId
    age_s: float
    held: int


Instruction: TypeAlias = Ended | Stop | Notice | LongHeld


class Source:
    """One transfer as its producer sees it. Only `SourceTable` changes it."""

    def __init__(self, transfer_id: str, consumer: EngineId, now: float, lease_s: float, peer: PeerKey | None) -> None:
        self.transfer_id = transfer_id
        self.consumer = consumer
        self.peer = peer
        self.state = SourceState.COMPUTING
        self.lease = Lease(now, lease_s)
        self.opened_at = now
        self.held_at: float | None = None
        self.warn_at = float("inf")
        self.acks: dict[int, str] = {}
        self.world_size: int | None = None
        self.pending: set[BatchKey] = set()
        self.computed = False
        self.failure = ""
        self.notice: NoticeKind = "failed"
        self.story: deque[str] = deque([f"opened by {consumer} at {now:.3f}"], maxlen=16)

    @property
    def writing(self) -> bool:
        """Whether its pages are pushed; `peer` is then where to."""
        return self.peer is not None

    def outcomes(self) -> str:
        """What its consumer's ranks have said, for messages."""
        return ", ".join(sorted(set(self.acks.values())))

    def tell(self) -> str:
        """What has happened to it, for error messages."""
        return "; ".join(self.story)
