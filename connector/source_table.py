"""The producer's state machine: who holds blocks for whom, and until when. The states are drawn in `connector.source`.

Events come in as method calls with the time; what has to happen comes out as instructions. There is no I/O and no clock
here, so that a test can play every interleaving. Retention is by ACK: a consumer that renews keeps its blocks as long
as it likes; only a lease that nobody renews ends a source without one.

The last ACK during COMPUTING does not wait for `hold`: the consumer has given up, so there is nothing to compute. One
that came before the request (see `connector.early`) makes `open` refuse.

Ids of ended transfers are remembered (bounded), so that a late or repeated message is told apart from an early one and
a used reference is never served again. What a consumer has to be told of a WRITE is kept until it acknowledges, or
until it has not been heard of for a lease.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

from connector.early import MAX_PARKED, Early
from connector.errors import InvalidTransition
from connector.identity import EngineId
from connector.imports import BatchKey, PeerKey
from connector.notices import Notices
from connector.remembered import MAX_REMEMBERED, EndedSources
from connector.source import (
    EDGES,
    ENDS,
    AckStatus,
    Ended,
    Instruction,
    LongHeld,
    Notice,
    NoticeKind,
    RenewStatus,
    Source,
    SourceState,
    Stop,
)

MAX_RANKS = 1024
POSTING = (SourceState.COMPUTING, SourceState.PUSHING)


class SourceTable:
    """Every source of one producer. Times are seconds of the caller's monotonic clock.

    A held source is warned about when it is `warn_after_s` old, and again each time that age has doubled.
    """

    def __init__(
        self, lease_s: float, warn_after_s: float, *, max_parked: int = MAX_PARKED, max_remembered: int = MAX_REMEMBERED
    ) -> None:
        self.lease_s = lease_s
        self.counters: Counter[str] = Counter()
        self.held = 0
        """Sources whose blocks are held."""
        self._warn_after_s = warn_after_s
        self._active: dict[str, Source] = {}
        self._by_batch: dict[BatchKey, Source] = {}
        self._early = Early(self.counters, acks_s=lease_s, max_parked=max_parked)
        self._ended = EndedSources(max_remembered)
        self._notices = Notices(lease_s)

    # Questions

    @property
    def active(self) -> int:
        """Sources being computed, held or pushed, or whose end their consumer has not acknowledged."""
        return len(self._active)

    def state(self, transfer_id: str) -> SourceState | None:
        """The state of a transfer, also of an ended one while it is remembered."""
        if source := self._active.get(transfer_id):
            return source.state
        return ended.state if (ended := self._ended.get(transfer_id)) else None

    def notices(self, consumer: EngineId) -> list[Notice]:
        """What this consumer has not acknowledged yet; to be told again after a reconnection."""
        return self._notices.of(consumer)

    def peers(self) -> set[PeerKey]:
        """The peers that operations are in flight to."""
        return {source.peer for source in self._active.values() if source.peer is not None and source.pending}

    # The producer's own events

    def open(self, transfer_id: str, consumer: EngineId, now: float, peer: PeerKey | None = None) -> None:
        """A consumer asks for a prompt: COMPUTING, and its lease starts. `peer` is where a WRITE goes.

        Raises:
            InvalidTransition: the id is in use or was used, or the consumer has already given up.
        """
        if source := self._active.get(transfer_id):
            raise InvalidTransition(f"transfer {transfer_id} is already {source.state}: {source.tell()}")
        if ended := self._ended.get(transfer_id):
            raise InvalidTransition(f"transfer {transfer_id} is over, a retry needs a new id: {ended.story}")
        source = Source(transfer_id, consumer, now, self.lease_s, peer)
        parked = self._early.take(transfer_id)
        if parked and parked.consumer != consumer:
            self.counters["acks_stale"] += len(parked.acks)
        elif parked:
            source.acks, source.world_size = parked.acks, parked.world_size
        if len(source.acks) == source.world_size or self._early.cancelled(transfer_id, consumer):
            source.state = SourceState.FAILED
            source.story.append(f"already given up: {source.outcomes() or 'cancelled'}")
            self.counters["sources_refused"] += 1
            self._ended.add(source)
            raise InvalidTransition(f"transfer {transfer_id} was given up by its consumer before it began")
        self._active[transfer_id] = source
        self.counters["sources_opened"] += 1

    def hold(self, transfer_id: str, num_blocks: int, now: float) -> None:
        """COMPUTING → HELD: the prompt has been computed and `num_blocks` blocks belong to the transfer.

        Raises:
            InvalidTransition: the source is not being computed (any more), or is a WRITE; the blocks stay with the
                caller.
        """
        source = self._find(transfer_id, SourceState.HELD)
        if source.writing:
            raise InvalidTransition(f"transfer {transfer_id} is written, not held: {source.tell()}")
        self._move(source, SourceState.HELD, f"held {num_blocks} blocks at {now:.3f}")
        source.held_at = now
        source.warn_at = now + self._warn_after_s
        self.held += 1
        self.counters["sources_held"] += 1

    def fail(self, transfer_id: str, detail: str, now: float) -> list[Instruction]:
        """The producer cannot or need not compute it. Failing twice changes nothing.

        Raises:
            InvalidTransition: the source is or was held or flushed, or was never opened.
        """
        if self.state(transfer_id) in (SourceState.FAILED, SourceState.STOPPING):
            return []
        source = self._find(transfer_id, SourceState.FAILED)
        if source.state not in POSTING:
            self._refuse(source, SourceState.FAILED)
        return self._stop(source, "failed", detail, now)

    def may_post(self, transfer_id: str) -> bool:
        """Whether pages of this WRITE may still be posted."""
        source = self._active.get(transfer_id)
        return source is not None and source.writing and source.state in POSTING

    def posted(self, transfer_id: str, batch: BatchKey, now: float) -> None:
        """A batch of a WRITE is on its way: COMPUTING → PUSHING with the first.

        Raises:
            InvalidTransition: the transfer has ended or is ending: nothing may be posted any more.
        """
        source = self._find(transfer_id, SourceState.PUSHING)
        if not source.writing or source.state not in POSTING or source.computed or batch in self._by_batch:
            raise InvalidTransition(f"transfer {transfer_id}: batch {batch} must not be posted: {source.tell()}")
        if source.state is SourceState.COMPUTING:
            self._move(source, SourceState.PUSHING, f"pushing from {now:.3f}")
        source.pending.add(batch)
        self._by_batch[batch] = source

    def computed(self, transfer_id: str, now: float) -> list[Instruction]:
        """Everything has been computed and posted: FLUSHED as soon as it has arrived.

        Raises:
            InvalidTransition: nothing was posted, or the transfer has ended.
        """
        source = self._find(transfer_id, SourceState.FLUSHED)
        if source.state is not SourceState.PUSHING or source.computed:
            self._refuse(source, SourceState.FLUSHED)
        source.computed = True
        return self._advance(source, now)

    # Events of the fabric and the peer

    def completed(self, batch: BatchKey, error: str | None, now: float) -> list[Instruction]:
        """Every operation of a batch is terminal, and arrived unless there is an error."""
        source = self._by_batch.pop(batch, None)
        if source is None:
            self.counters["pushes_unknown"] += 1
            return []
        source.pending.discard(batch)
        stopped = self._stop(source, "failed", error, now) if error is not None else []
        return stopped or self._advance(source, now)

    def peer_down(self, peer: PeerKey, cause: str, now: float) -> list[Instruction]:
        """The consumer's memory cannot be reached any more; what is in flight ends at the fence."""
        return [
            instruction
            for source in self._to(peer)
            if source.state in POSTING
            for instruction in self._stop(source, "failed", f"the consumer is lost: {cause}", now)
        ]

    def fenced(self, peer: PeerKey, cause: str, now: float) -> list[Instruction]:
        """No operation to this peer is in flight any more."""
        instructions = self.peer_down(peer, f"fenced: {cause}", now)
        for source in self._to(peer):
            for batch in source.pending:
                del self._by_batch[batch]
            source.pending.clear()
            instructions += self._advance(source, now)
        return instructions

    # The consumer's events

    def renew(self, transfer_id: str, consumer: EngineId, now: float) -> RenewStatus:
        """The consumer still wants it. "unknown" may mean that its request has not arrived yet."""
        source = self._active.get(transfer_id)
        if source is None:
            ended = transfer_id in self._ended
            self.counters["renewals_late" if ended else "renewals_unknown"] += 1
            return "ended" if ended else "unknown"
        if source.consumer != consumer:
            self.counters["renewals_stale"] += 1
            return "unknown"
        source.lease.renew(now)
        self.counters["renewals"] += 1
        return "renewed"

    def ack(
        self, transfer_id: str, consumer: EngineId, rank: int, world_size: int, outcome: str, now: float
    ) -> tuple[AckStatus, list[Instruction]]:
        """Rank `rank` of the consumer's `world_size` ranks is done with the transfer, whatever the outcome."""
        if not 0 <= rank < world_size <= MAX_RANKS:
            return self._ack_counted("invalid"), []
        source = self._active.get(transfer_id)
        if source is None:
            return self._ack_without_source(transfer_id, consumer, rank, world_size, outcome, now), []
        if source.consumer != consumer:
            return self._ack_counted("stale"), []
        if source.world_size not in (None, world_size):
            return self._ack_counted("invalid"), []
        if rank in source.acks:
            return self._ack_counted("duplicate"), []
        source.acks[rank] = outcome
        source.world_size = world_size
        source.story.append(f"ACK {outcome} of rank {rank}/{world_size} at {now:.3f}")
        status = self._ack_counted("accepted")
        if len(source.acks) < world_size:
            return status, []
        if source.state in POSTING:
            detail = f"given up by the consumer while it was computed: {source.outcomes()}"
            return status, self._stop(source, "stopped", detail, now)
        if source.state is SourceState.STOPPING:
            return status, []
        return status, self._end(source, SourceState.RELEASED, source.outcomes(), now)

    def cancel(self, transfer_id: str, consumer: EngineId, now: float) -> list[Instruction]:
        """The consumer of a WRITE wants to hear that nothing of it is in flight any more, nor ever will be."""
        source = self._active.get(transfer_id)
        self.counters["cancels"] += 1
        if source is None or source.consumer != consumer:
            known = source is not None or transfer_id in self._ended or self._early.cancel(transfer_id, consumer, now)
            return [Notice(transfer_id, consumer, "stopped", "it is not written to")] if known else []
        if source.state in POSTING and source.writing:
            return self._stop(source, "stopped", "cancelled by the consumer", now)
        return [told] if (told := self._notices.about(transfer_id, consumer)) else []

    # Time

    def reap(self, now: float) -> list[Instruction]:
        """End every source whose lease is over, warn of old ones, drop what nothing came for."""
        instructions: list[Instruction] = []
        for source in list(self._active.values()):
            if now < source.lease.deadline and now < source.warn_at:
                continue
            if source.lease.expired(now):
                instructions += self._expire(source, now)
            elif source.held_at is not None:
                age = now - source.held_at
                source.warn_at = now + age
                self.counters["sources_long_held"] += 1
                instructions.append(LongHeld(source.transfer_id, source.consumer, age, self.held))
        self._early.expire(now)
        self.counters["notices_given_up"] += self._notices.expire(now, self._active)
        return instructions

    def close(self, now: float) -> list[Instruction]:
        """The producer goes away: end everything; what is in flight ends when its peer is fenced."""
        instructions: list[Instruction] = []
        for source in list(self._active.values()):
            if source.state in POSTING:
                instructions += self._stop(source, "failed", "the connector was closed", now)
            elif source.state is not SourceState.STOPPING:
                instructions += self._end(source, SourceState.EXPIRED, "the connector was closed", now)
        return instructions

    # Proof

    def validate(self) -> None:
        """Check every invariant; for tests, after every event. Raises `AssertionError`."""
        for transfer_id, source in self._active.items():
            story = source.tell()
            assert transfer_id == source.transfer_id, story
            assert source.state in EDGES, f"an ended source is still active: {story}"
            assert (source.held_at is not None) == (source.state is SourceState.HELD), story
            assert source.lease.deadline >= source.opened_at + self.lease_s, f"a lease was shortened: {story}"
            stopping = source.state is SourceState.STOPPING
            assert stopping or len(source.acks) < (source.world_size or 1), f"nobody waits for it: {story}"
            assert source.state in (SourceState.PUSHING, SourceState.STOPPING) or not source.pending, story
            assert not stopping or source.pending, f"stops, and waits for nothing: {story}"
            assert all(self._by_batch.get(batch) is source for batch in source.pending), story
            assert transfer_id not in self._ended, f"active and ended: {story}"
            assert transfer_id not in self._early, f"active and parked: {story}"
        self._ended.validate(self._early)
        self._early.validate()
        assert len(self._by_batch) == sum(len(source.pending) for source in self._active.values())
        assert self.held == sum(source.state is SourceState.HELD for source in self._active.values())
        ended = sum(self.counters[f"sources_{outcome}"] for outcome in ENDS.values())
        assert self.counters["sources_opened"] == len(self._active) + ended, dict(self.counters)

    # Inside

    def _to(self, peer: PeerKey) -> list[Source]:
        return [source for source in self._active.values() if source.peer == peer]

    def _find(self, transfer_id: str, to: SourceState) -> Source:
        if source := self._active.get(transfer_id):
            return source
        ended = self._ended.get(transfer_id)
        known = f"is {ended.state}: {ended.story}" if ended else "was never opened, or ended long ago"
        raise InvalidTransition(f"transfer {transfer_id} cannot become {to}; it {known}")

    def _refuse(self, source: Source, to: SourceState) -> None:
        raise InvalidTransition(f"transfer {source.transfer_id} is {source.state}, not to become {to}: {source.tell()}")

    def _move(self, source: Source, to: SourceState, story: str) -> None:
        if to not in EDGES[source.state]:
            self._refuse(source, to)
        source.state = to
        source.story.append(story)

    def _stop(self, source: Source, kind: NoticeKind, detail: str, now: float) -> list[Instruction]:
        """No more is computed or posted. It has failed when nothing is in flight any more; the first reason stands."""
        if source.state is SourceState.COMPUTING:
            source.notice = kind
            return self._end(source, SourceState.FAILED, detail, now)
        if source.state is not SourceState.PUSHING:
            return []
        source.notice, source.failure = kind, detail
        self._move(source, SourceState.STOPPING, f"stopping at {now:.3f}: {detail}")
        return [Stop(source.transfer_id, detail), *self._advance(source, now)]

    def _advance(self, source: Source, now: float) -> list[Instruction]:
        """Nothing in flight: a WRITE has arrived, or is over."""
        if source.pending:
            return []
        if source.state is SourceState.STOPPING:
            return self._end(source, SourceState.FAILED, source.failure, now)
        if source.state is not SourceState.PUSHING or not source.computed:
            return []
        self._move(source, SourceState.FLUSHED, f"flushed at {now:.3f}")
        self.counters["sources_flushed"] += 1
        ended = Ended(source.transfer_id, "flushed", "everything has arrived", now - source.opened_at)
        return [self._notices.tell(source.transfer_id, source.consumer, "commit", "", now), ended]

    def _end(self, source: Source, to: SourceState, detail: str, now: float) -> list[Instruction]:
        before = source.state
        self._move(source, to, f"{to} at {now:.3f}: {detail}")
        if source.held_at is not None:
            source.held_at = None
            self.held -= 1
        del self._active[source.transfer_id]
        self.counters[f"sources_{to}"] += 1
        self._ended.add(source)
        if before is SourceState.FLUSHED:
            self._notices.drop(source.transfer_id)
            return []
        ended: list[Instruction] = [Ended(source.transfer_id, ENDS[to], detail, now - source.opened_at)]
        if source.writing and len(source.acks) < (source.world_size or 1):
            ended.append(self._notices.tell(source.transfer_id, source.consumer, source.notice, detail, now))
        return ended

    def _expire(self, source: Source, now: float) -> list[Instruction]:
        if source.state is SourceState.STOPPING:
            return []
        age = now - source.opened_at
        detail = f"{source.consumer} has not renewed within {source.lease.lease_s:g} s (age {age:.1f} s)"
        self.counters[f"leases_expired_{source.state}"] += 1
        if source.state in POSTING:
            return self._stop(source, "failed", detail, now)
        return self._end(source, SourceState.EXPIRED, detail, now)

    def _ack_counted(self, status: AckStatus) -> AckStatus:
        self.counters[f"acks_{status}"] += 1
        return status

    def _ack_without_source(
        self, transfer_id: str, consumer: EngineId, rank: int, world_size: int, outcome: str, now: float
    ) -> AckStatus:
        if self._notices.about(transfer_id, consumer):
            self._notices.drop(transfer_id)
            return self._ack_counted("accepted")
        if ended := self._ended.get(transfer_id):
            repeated = ended.consumer == consumer and rank in ended.ranks
            return self._ack_counted("duplicate" if repeated else "stale")
        status = self._early.ack(transfer_id, consumer, rank, world_size, outcome, now)
        return self._ack_counted(cast(AckStatus, status))
