"""The consumer's state machine: who owns destination blocks, and until when.

    plan ──► PLANNED ──► POSTED ──► LANDED ──► PUBLISHED
                │          ├──► FAILING ────► FAILED
                │          └──► CANCELLING ─► CANCELLED
                └──► FAILED (nothing was posted)

A posted transfer cannot be recalled, and an error does not prove that the hardware has stopped. Blocks therefore belong
to their import until every batch of it is terminal or its peer has been fenced; FAILING and CANCELLING are where it
waits for that. Every import has a deadline; when it passes with batches still out, the peer is fenced.

Whether the bytes may be used is decided once, when the last batch has completed: only if none failed, nobody cancelled,
and the consumer's own lease deadline has not come. As with the source, events come in with the time, instructions go
out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from connector.errors import InvalidTransition
from connector.lease import Lease
from connector.transport.base import Offsets

MAX_REMEMBERED = 8192

PeerKey: TypeAlias = tuple[str, int]
"""Transport name and its number for the peer."""
BatchKey: TypeAlias = tuple[str, int]
"""Transport name and its number for the batch."""


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


Instruction: TypeAlias = Landed | Settled | Fence


class Import:
    """One transfer as its consumer sees it. Only `Sink` changes it."""

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
        self.pending: set[BatchKey] = set()
        self.reason: Reason | None = None
        self.detail = ""
        self.story: deque[str] = deque([f"planned for peer {peer} at {now:.3f}"], maxlen=16)

    def tell(self) -> str:
        """What has happened to it, for error messages."""
        return "; ".join(self.story)


class Sink:
    """Every import of one consumer, and the owner of each destination block.

    `block_counts` are the pool's blocks by group. Times are seconds of the caller's monotonic clock.
    """

    def __init__(self, block_counts: Mapping[str, int], *, max_remembered: int = MAX_REMEMBERED) -> None:
        self.counters: Counter[str] = Counter()
        self._max_remembered = max_remembered
        self._imports: dict[str, Import] = {}
        self._by_batch: dict[BatchKey, Import] = {}
        self._over: OrderedDict[BatchKey, None] = OrderedDict()
        self._next_number = 1
        self._owner: dict[str, npt.NDArray[np.int64]] = {
            name: np.zeros(count, dtype=np.int64) for name, count in block_counts.items()
        }

    # Questions

    @property
    def active(self) -> int:
        """Imports that own blocks."""
        return len(self._imports)

    def state(self, transfer_id: str) -> ImportState | None:
        """The state of an import that still owns blocks."""
        return found.state if (found := self._imports.get(transfer_id)) else None

    def peers(self) -> set[PeerKey]:
        """The peers that imports read from."""
        return {found.peer for found in self._imports.values()}

    # Events of the owner

    def plan(
        self,
        transfer_id: str,
        peer: PeerKey,
        blocks: Mapping[str, Offsets],
        *,
        lease: Lease | None,
        deadline: float,
        now: float,
    ) -> None:
        """An import takes its destination blocks over: PLANNED. `lease` None: the source cannot end (a measurement).

        Raises:
            InvalidTransition: the transfer is being imported already, or a block belongs to another import.
        """
        if found := self._imports.get(transfer_id):
            raise InvalidTransition(f"transfer {transfer_id} is being imported already: {found.tell()}")
        for group, ids in blocks.items():
            taken = ids[self._owner[group][ids] != 0]
            if taken.size:
                raise InvalidTransition(
                    f"transfer {transfer_id}: block {taken[0]} of group {group!r} still belongs to another import"
                )
        planned = Import(transfer_id, self._next_number, peer, blocks, lease, deadline, now)
        self._next_number += 1
        for group, ids in blocks.items():
            self._owner[group][ids] = planned.number
        self._imports[transfer_id] = planned
        self.counters["imports_planned"] += 1

    def posted(self, transfer_id: str, batch: BatchKey, now: float) -> None:
        """One batch is on its way. More may follow until `posting_done` or `post_failed`."""
        found = self._find(transfer_id)
        if not found.posting or batch in self._by_batch:
            raise InvalidTransition(f"transfer {transfer_id}: batch {batch} was not expected: {found.tell()}")
        if found.state is ImportState.PLANNED:
            self._move(found, ImportState.POSTED, f"posted at {now:.3f}")
        found.pending.add(batch)
        self._by_batch[batch] = found

    def posting_done(self, transfer_id: str, now: float) -> list[Instruction]:
        """Every batch has been posted."""
        found = self._find(transfer_id)
        if not found.posting or found.state is ImportState.PLANNED:
            raise InvalidTransition(f"transfer {transfer_id}: there was nothing to finish posting: {found.tell()}")
        found.posting = False
        return self._advance(found, now)

    def post_failed(self, transfer_id: str, reason: Reason, detail: str, now: float) -> list[Instruction]:
        """A batch could not be posted, and no more will be."""
        found = self._find(transfer_id)
        found.posting = False
        if found.state is ImportState.PLANNED:
            found.reason, found.detail = reason, detail
            return [self._settle(found, ImportState.FAILED, f"nothing was posted: {detail}")]
        self._give_up(found, ImportState.FAILING, reason, detail, now)
        return self._advance(found, now)

    def publish(self, transfer_id: str, now: float) -> list[Instruction]:
        """LANDED → PUBLISHED: the pages are the caller's to use."""
        found = self._find(transfer_id)
        return [self._settle(found, ImportState.PUBLISHED, f"published at {now:.3f}")]

    def cancel(self, transfer_id: str, now: float) -> list[Instruction]:
        """Nobody wants it any more. Changes nothing when the import is over or has failed anyway."""
        found = self._imports.get(transfer_id)
        if found is None or found.state is not ImportState.POSTED:
            return []
        self._give_up(found, ImportState.CANCELLING, Reason.CANCELLED, "cancelled by its owner", now)
        return self._advance(found, now)

    # Events of the fabric and the peer

    def completed(self, batch: BatchKey, error: str | None, now: float) -> list[Instruction]:
        """Every operation of a batch is terminal. Late, repeated and unknown ones are counted and change nothing."""
        found = self._by_batch.get(batch)
        if found is None:
            self.counters["completions_late" if batch in self._over else "completions_unknown"] += 1
            return []
        self._forget_batch(found, batch)
        if error is not None:
            self.counters["batches_failed"] += 1
            self._give_up(found, ImportState.FAILING, Reason.TRANSFER_ERROR, error, now)
        return self._advance(found, now)

    def source_lost(self, transfer_id: str, detail: str, now: float) -> list[Instruction]:
        """The producer says that the source has ended: whatever is read from now on is nobody's pages."""
        found = self._imports.get(transfer_id)
        if found is None:
            return []
        self._give_up(found, ImportState.FAILING, Reason.SOURCE_EXPIRED, detail, now)
        return self._advance(found, now)

    def peer_down(self, peer: PeerKey, cause: str, now: float) -> list[Instruction]:
        """The peer cannot be reached, or must not be. Its batches may never complete, so it is fenced."""
        self.counters["peers_down"] += 1
        for found in self._of(peer):
            self._give_up(found, ImportState.FAILING, Reason.PEER_LOST, cause, now)
        return [Fence(peer, cause)]

    def fenced(self, peer: PeerKey, cause: str, now: float) -> list[Instruction]:
        """The connection is torn down: no operation of that peer touches local memory any more.

        An import that is still being posted is told by its next post, which fails.
        """
        self.counters["peers_fenced"] += 1
        instructions: list[Instruction] = []
        for found in self._of(peer):
            for batch in list(found.pending):
                self._forget_batch(found, batch)
            self._give_up(found, ImportState.FAILING, Reason.PEER_LOST, f"fenced: {cause}", now)
            instructions += self._advance(found, now)
        return instructions

    # Time

    def tick(self, now: float) -> list[Instruction]:
        """Give up what has taken too long or lost its source; fence peers whose batches outlived the deadline."""
        overdue: dict[PeerKey, str] = {}
        for found in self._imports.values():
            if found.state not in IN_FLIGHT:
                continue
            if found.lease is not None and found.lease.expired(now):
                detail = "the lease was not renewed in time, so the source may be gone"
                self._give_up(found, ImportState.FAILING, Reason.SOURCE_EXPIRED, detail, now)
            if now >= found.deadline:
                detail = f"{len(found.pending)} batches are still out at the deadline"
                self._give_up(found, ImportState.FAILING, Reason.TIMEOUT, detail, now)
                overdue.setdefault(found.peer, f"transfer {found.transfer_id} timed out: {detail}")
        return [fence for peer, cause in overdue.items() for fence in self.peer_down(peer, cause, now)]

    # Proof

    def validate(self) -> None:
        """Check every invariant; for tests, after every event. Raises `AssertionError`."""
        owned: Counter[str] = Counter()
        for transfer_id, found in self._imports.items():
            story = found.tell()
            assert transfer_id == found.transfer_id, story
            assert found.state in EDGES, f"settled, and still an owner: {story}"
            assert found.state is not ImportState.PLANNED or not found.pending, story
            if found.state in IN_FLIGHT:
                assert found.pending or found.posting, f"waits for nothing: {story}"
            assert found.state is not ImportState.LANDED or not (found.pending or found.posting), story
            assert (found.reason is not None) == (found.state in (ImportState.FAILING, ImportState.CANCELLING)), story
            assert all(self._by_batch.get(batch) is found for batch in found.pending), story
            for group, ids in found.blocks.items():
                assert np.all(self._owner[group][ids] == found.number), f"does not own its blocks: {story}"
                owned[group] += len(ids)
        for group, owner in self._owner.items():
            assert np.count_nonzero(owner) == owned[group], f"blocks of group {group!r} belong to nobody alive"
        assert len(self._by_batch) == sum(len(found.pending) for found in self._imports.values())
        assert len(self._over) <= self._max_remembered
        over = sum(self.counters[f"imports_{outcome}"] for outcome in OUTCOMES.values())
        assert self.counters["imports_planned"] == len(self._imports) + over, dict(self.counters)

    # Inside

    def _find(self, transfer_id: str) -> Import:
        if found := self._imports.get(transfer_id):
            return found
        raise InvalidTransition(f"transfer {transfer_id} is not being imported")

    def _of(self, peer: PeerKey) -> Iterable[Import]:
        return [found for found in self._imports.values() if found.peer == peer]

    def _move(self, found: Import, to: ImportState, story: str) -> None:
        if to not in EDGES.get(found.state, set()):
            raise InvalidTransition(
                f"transfer {found.transfer_id} is {found.state}, not to become {to}: {found.tell()}"
            )
        found.state = to
        found.story.append(story)

    def _give_up(
        self,
        found: Import,
        to: Literal[ImportState.FAILING, ImportState.CANCELLING],
        reason: Reason,
        detail: str,
        now: float,
    ) -> None:
        """The first reason stands; an import that is on its way out already stays on it."""
        if found.state is ImportState.POSTED:
            self._move(found, to, f"{to} at {now:.3f}: {reason}: {detail}")
            found.reason, found.detail = reason, detail

    def _advance(self, found: Import, now: float) -> list[Instruction]:
        """Every batch terminal: the import lands, or is over."""
        if found.pending or found.posting or found.state not in IN_FLIGHT:
            return []
        if found.state is ImportState.POSTED:
            if found.lease is not None and found.lease.expired(now):
                detail = "the read finished after the lease was over: the blocks may have been somebody else's"
                self.counters["reads_after_expiry"] += 1
                self._give_up(found, ImportState.FAILING, Reason.SOURCE_EXPIRED, detail, now)
            else:
                self._move(found, ImportState.LANDED, f"landed at {now:.3f}")
                return [Landed(found.transfer_id)]
        if found.state is ImportState.FAILING:
            return [self._settle(found, ImportState.FAILED, f"failed at {now:.3f}")]
        return [self._settle(found, ImportState.CANCELLED, f"cancelled at {now:.3f}")]

    def _settle(self, found: Import, to: ImportState, story: str) -> Settled:
        self._move(found, to, story)
        for group, ids in found.blocks.items():
            self._owner[group][ids] = 0
        del self._imports[found.transfer_id]
        self.counters[f"imports_{to}"] += 1
        if to is ImportState.FAILED and found.reason is not None:
            self.counters[f"imports_failed_{found.reason.lower()}"] += 1
        return Settled(found.transfer_id, OUTCOMES[to], found.reason, found.detail)

    def _forget_batch(self, found: Import, batch: BatchKey) -> None:
        found.pending.discard(batch)
        del self._by_batch[batch]
        self._over[batch] = None
        while len(self._over) > self._max_remembered:
            self._over.popitem(last=False)
