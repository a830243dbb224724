"""The consumer's state machine: who owns destination blocks, and until when. The states are drawn in
`connector.imports`.

Every import has a deadline. When it passes with batches of a READ still out, the peer is fenced; a WRITE is not this
worker's to stop, so its producer is asked to, and the blocks stay quarantined until it answers or its process is gone.

Whether the bytes may be used is decided once, when the last batch has completed: only if none failed, nobody cancelled,
and the consumer's own lease deadline has not come. As with the source, events come in with the time, instructions go
out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from math import inf
from typing import Literal

import numpy as np
import numpy.typing as npt

from connector.errors import InvalidTransition
from connector.imports import (
    EDGES,
    IN_FLIGHT,
    OUTCOMES,
    WRITTEN_BY_PEER,
    BatchKey,
    Fence,
    Import,
    ImportState,
    Instruction,
    Landed,
    PeerKey,
    Reason,
    Settled,
    StopWriting,
)
from connector.lease import Lease
from connector.transport.base import Offsets

MAX_REMEMBERED = 8192


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

    def peer(self, transfer_id: str) -> PeerKey | None:
        """The peer of an import that still owns blocks."""
        return found.peer if (found := self._imports.get(transfer_id)) else None

    @property
    def quarantined(self) -> int:
        """Blocks that nobody wants any more and that a producer may still write."""
        given_up = (ImportState.FAILING, ImportState.CANCELLING)
        return sum(
            sum(map(len, found.blocks.values()))
            for found in self._imports.values()
            if found.written and found.state in given_up
        )

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

    def expect(self, transfer_id: str, peer: PeerKey, blocks: Mapping[str, Offsets], *, now: float) -> None:
        """A producer is about to be asked to write into these blocks: POSTED. There is no deadline until `limit` sets
        one: the request for it has its own. Raises as `plan`."""
        self.plan(transfer_id, peer, blocks, lease=None, deadline=inf, now=now)
        found = self._find(transfer_id)
        found.written = True
        self.posted(transfer_id, (WRITTEN_BY_PEER, found.number), now)
        found.posting = False

    def limit(self, transfer_id: str, deadline: float) -> None:
        """A WRITE has to be there by `deadline`. Changes nothing when it is over."""
        if found := self._imports.get(transfer_id):
            found.deadline = deadline

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
        return [StopWriting(transfer_id)] if found.written else self._advance(found, now)

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

    def committed(self, transfer_id: str, now: float) -> list[Instruction]:
        """The producer says that every page has arrived, and that it writes no more."""
        found = self._written(transfer_id, "commits")
        return [] if found is None else self.completed((WRITTEN_BY_PEER, found.number), None, now)

    def not_written(self, transfer_id: str, detail: str, now: float) -> list[Instruction]:
        """The producer says that it will not finish, and that it writes no more."""
        found = self._written(transfer_id, "write_ends")
        if found is None:
            return []
        self._give_up(found, ImportState.FAILING, Reason.PRODUCER_FAILED, detail, now)
        return self.completed((WRITTEN_BY_PEER, found.number), None, now)

    def source_lost(self, transfer_id: str, detail: str, now: float) -> list[Instruction]:
        """The producer says that the source has ended: whatever is read from now on is nobody's pages, and nothing is
        written any more."""
        found = self._imports.get(transfer_id)
        if found is None:
            return []
        self._give_up(found, ImportState.FAILING, Reason.SOURCE_EXPIRED, detail, now)
        return self.not_written(transfer_id, detail, now) if found.written else self._advance(found, now)

    def peer_down(
        self, peer: PeerKey, cause: str, now: float, *, gone: bool = True, quiet_s: float = 0.0
    ) -> list[Instruction]:
        """The peer cannot be reached, or must not be. Its batches may never complete, so it is fenced.

        `gone`: its process has ended, as far as the transport can tell; otherwise it may still write. What it had sent
        before may still be on its way for `quiet_s` after the fence.
        """
        self.counters["peers_down"] += 1
        stop: list[Instruction] = []
        for found in self._of(peer):
            found.gone = found.gone or gone
            found.quiet_s = quiet_s
            if found.written and not found.gone and found.state is ImportState.POSTED:
                stop.append(StopWriting(found.transfer_id))
            # The transport's own deadline may come before the next tick.
            reason = Reason.TIMEOUT if now >= found.deadline else Reason.PEER_LOST
            self._give_up(found, ImportState.FAILING, reason, cause, now)
        return [*stop, Fence(peer, cause)]

    def moved(self, before: PeerKey, peer: PeerKey) -> None:
        """The same process is reached anew: its death is from now on reported of `peer`."""
        for found in self._of(before):
            if found.written:
                found.peer = peer

    def fenced(self, peer: PeerKey, cause: str, now: float) -> list[Instruction]:
        """The connection is torn down: no operation of that peer touches local memory any more.

        An import that is still being posted is told by its next post, which fails.
        """
        self.counters["peers_fenced"] += 1
        instructions: list[Instruction] = []
        for found in self._of(peer):
            self._give_up(found, ImportState.FAILING, Reason.PEER_LOST, f"fenced: {cause}", now)
            if found.written and not found.gone:
                continue
            if found.written and found.quiet_s > 0:
                found.quiet_at = now + found.quiet_s
                continue
            for batch in list(found.pending):
                self._forget_batch(found, batch)
            instructions += self._advance(found, now)
        return instructions

    # Time

    def tick(self, now: float) -> list[Instruction]:
        """Give up what has taken too long or lost its source; fence peers whose batches outlived the deadline."""
        overdue: dict[PeerKey, str] = {}
        stop: list[Instruction] = []
        quiet: list[Instruction] = []
        for found in list(self._imports.values()):
            if found.state not in IN_FLIGHT:
                continue
            if now >= found.quiet_at:
                quiet += self.completed((WRITTEN_BY_PEER, found.number), None, now)
                continue
            if found.lease is not None and found.lease.expired(now):
                detail = "the lease was not renewed in time, so the source may be gone"
                self._give_up(found, ImportState.FAILING, Reason.SOURCE_EXPIRED, detail, now)
            if now >= found.deadline:
                detail = f"{len(found.pending)} batches are still out at the deadline"
                if found.written and found.state is ImportState.POSTED:
                    stop.append(StopWriting(found.transfer_id))
                self._give_up(found, ImportState.FAILING, Reason.TIMEOUT, detail, now)
                if found.written:
                    continue
                overdue.setdefault(found.peer, f"transfer {found.transfer_id} timed out: {detail}")
        fences = [fence for peer, cause in overdue.items() for fence in self.peer_down(peer, cause, now, gone=False)]
        return [*quiet, *stop, *fences]

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

    def _written(self, transfer_id: str, what: str) -> Import | None:
        found = self._imports.get(transfer_id)
        if found is None or not found.written:
            self.counters[f"{what}_unknown"] += 1
            return None
        return found

    def _of(self, peer: PeerKey) -> list[Import]:
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
