"""One import as its consumer sees it: states, edges, and what a change of state asks for.

    plan ──► PLANNED ──► POSTED ──► LANDED ──► PUBLISHED
                │          ├──► FAILING ────► FAILED
                │          └──► CANCELLING ─► CANCELLED
                └──► FAILED (nothing was posted)

A posted transfer cannot be recalled, and an error does not prove that the hardware has stopped. Blocks therefore belong
to their import until every batch of it is terminal or its peer has been fenced; FAILING and CANCELLING are where it
waits for that. In a WRITE the producer posts: there is one batch, which is terminal when the producer says so (Commit,
Failed or Stopped) or its process is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from math import inf
from typing import Literal, TypeAlias

import msgspec

from connector.lease import Lease
from connector.transport.base import Offsets

PeerKey: TypeAlias = tuple[str, int]
"""Transport name and its number for the peer."""
BatchKey: TypeAlias = tuple[str, int]
"""Transport name and its number for the batch."""

WRITTEN_BY_PEER = "written by the peer"
"""In place of a transport's name: the batch that stands for everything that a producer writes."""


class ImportState(StrEnum):
    """See the module's drawing."""

    PLANNED = "planned"
    POSTED = "posted"
    LANDED = "landed"
    PUBLISHED = "published"
    FAILING = "failing"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


EDGES = {
    ImportState.PLANNED: {ImportState.POSTED, ImportState.FAILED},
    ImportState.POSTED: {ImportState.LANDED, ImportState.FAILING, ImportState.CANCELLING},
    ImportState.LANDED: {ImportState.PUBLISHED},
    ImportState.FAILING: {ImportState.FAILED},
    ImportState.CANCELLING: {ImportState.CANCELLED},
}


IN_FLIGHT = (ImportState.POSTED, ImportState.FAILING, ImportState.CANCELLING)
Outcome = Literal["published", "failed", "cancelled"]
OUTCOMES: dict[ImportState, Outcome] = {
    ImportState.PUBLISHED: "published",
    ImportState.FAILED: "failed",
    ImportState.CANCELLED: "cancelled",
}


class Reason(StrEnum):
    """Why an import ended without pages."""

    PLAN_REFUSED = "PLAN_REFUSED"
    PEER_LOST = "PEER_LOST"
    TRANSFER_ERROR = "TRANSFER_ERROR"
    TIMEOUT = "TIMEOUT"
    SOURCE_EXPIRED = "SOURCE_EXPIRED"
    CANCELLED = "CANCELLED"
    PRODUCER_FAILED = "PRODUCER_FAILED"


class Landed(msgspec.Struct, frozen=True):
    """Instruction: every byte is there and valid; publish it."""

    transfer_id: str


class Settled(msgspec.Struct, frozen=True):
    """Instruction: the import is over and owns no block any more."""

    transfer_id: str
    outcome: Outcome
    reason: Reason | None
    detail: str


class Fence(msgspec.Struct, frozen=True):
    """Instruction: tear the connection to this peer down, then say `fenced`."""

    peer: PeerKey
    cause: str


class StopWriting(msgspec.Struct, frozen=True):
    """Instruction: ask the producer to stop, until it answers; the blocks stay the import's until then."""

    transfer_id: str


Instruction: TypeAlias = Landed | Settled | Fence | StopWriting


class Import:
    """One transfer as its consumer sees it. Only `Sink` changes it.

    `written`: the producer writes it. `gone`: the producer's process has ended, so that a fence ends that too; at
    `quiet_at` nothing of it can be on its way any more.
    """

    def __init__(
        self,
        transfer_id: str,
        number: int,
        peer: PeerKey,
        blocks: Mapping[str, Offsets],
        lease: Lease | None,
        deadline: float,
        now: float,
    ) -> None:
        self.transfer_id = transfer_id
        self.number = number
        self.peer = peer
        self.blocks = blocks
        self.lease = lease
        self.deadline = deadline
        self.state = ImportState.PLANNED
        self.posting = True
        self.written = False
        self.gone = False
        self.quiet_s = 0.0
        self.quiet_at = inf
        self.pending: set[BatchKey] = set()
        self.reason: Reason | None = None
        self.detail = ""
        self.story: deque[str] = deque([f"planned for peer {peer} at {now:.3f}"], maxlen=16)

    def tell(self) -> str:
        """What has happened to it, for error messages."""
        return "; ".join(self.story)
