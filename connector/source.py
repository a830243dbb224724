"""The producer's state machine: who holds blocks for whom, and until when.

    open ──► COMPUTING ──hold──► HELD ──last ACK──► RELEASED
                 │                 └──lease over──► EXPIRED
                 └──cannot compute, lease over, or nobody wants it any more──► FAILED

Events come in as method calls with the time; what has to happen comes out as instructions. There is no I/O and no clock
here, so that a test can play every interleaving. Retention is by ACK: a consumer that renews keeps its blocks as long
as it likes; only a lease that nobody renews ends a source without one.

An ACK may arrive before the request that it is about (two connections, no order between them). It is parked, bounded in
count and age, and makes `open` refuse: the consumer has given up, so there is nothing to compute. For the same reason
the last ACK during COMPUTING does not wait for `hold`; it ends the computation.

Ids of ended transfers are remembered (bounded), so that a late or repeated message is told apart from an early one and
a used reference is never served again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec

from connector.errors import InvalidTransition
from connector.identity import EngineId
from connector.lease import Lease

MAX_PARKED = 1024
MAX_REMEMBERED = 8192
MAX_RANKS = 1024


class SourceState(StrEnum):
    """See the module's drawing."""

    COMPUTING = "computing"
    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"
    FAILED = "failed"


EDGES = {
    SourceState.COMPUTING: {SourceState.HELD, SourceState.FAILED},
    SourceState.HELD: {SourceState.RELEASED, SourceState.EXPIRED},
}

AckStatus = Literal["accepted", "duplicate", "parked", "stale", "invalid"]
RenewStatus = Literal["renewed", "unknown", "ended"]
Outcome = Literal["released", "expired", "failed"]
OUTCOMES: dict[SourceState, Outcome] = {
    SourceState.RELEASED: "released",
    SourceState.EXPIRED: "expired",
    SourceState.FAILED: "failed",
}


class Ended(msgspec.Struct, frozen=True):
    """Instruction: the source is over; abort its computation, or free its blocks."""

    transfer_id: str
    outcome: Outcome
    detail: str
    age_s: float


class LongHeld(msgspec.Struct, frozen=True):
    """Instruction: warn that blocks are held unusually long by a consumer that is alive."""

    transfer_id: str
    consumer: EngineId
    age_s: float
    held: int


Instruction: TypeAlias = Ended | LongHeld


class Source:
    """One transfer as its producer sees it. Only `SourceTable` changes it."""

    def __init__(self, transfer_id: str, consumer: EngineId, now: float, lease_s: float) -> None:
        self.transfer_id = transfer_id
        self.consumer = consumer
        self.state = SourceState.COMPUTING
        self.lease = Lease(now, lease_s)
        self.opened_at = now
        self.held_at: float | None = None
        self.warn_at = float("inf")
        self.num_blocks = 0
        self.acks: dict[int, str] = {}
        self.world_size: int | None = None
        self.story: deque[str] = deque([f"opened by {consumer} at {now:.3f}"], maxlen=16)

    def tell(self) -> str:
        """What has happened to it, for error messages."""
        return "; ".join(self.story)


class _Parked(msgspec.Struct):
    consumer: EngineId
    world_size: int
    acks: dict[int, str]
    since: float


class _Remembered(msgspec.Struct, frozen=True):
    state: SourceState
    consumer: EngineId
    ranks: frozenset[int]
    story: str


class SourceTable:
    """Every source of one producer. Times are seconds of the caller's monotonic clock.

    A held source is warned about when it is `warn_after_s` old, and again each time that age has doubled.
    """

    def __init__(
        self,
        lease_s: float,
        warn_after_s: float,
        *,
        max_parked: int = MAX_PARKED,
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        self.lease_s = lease_s
        self.counters: Counter[str] = Counter()
        self._warn_after_s = warn_after_s
        self._max_parked = max_parked
        self._max_remembered = max_remembered
        self._active: dict[str, Source] = {}
        self._parked: OrderedDict[str, _Parked] = OrderedDict()
        self._ended: OrderedDict[str, _Remembered] = OrderedDict()

    # Questions

    @property
    def active(self) -> int:
        """Sources being computed or held."""
        return len(self._active)

    @property
    def held(self) -> int:
        """Sources whose blocks are held."""
        return sum(source.state is SourceState.HELD for source in self._active.values())

    def state(self, transfer_id: str) -> SourceState | None:
        """The state of a transfer, also of an ended one while it is remembered."""
        if source := self._active.get(transfer_id):
            return source.state
        return ended.state if (ended := self._ended.get(transfer_id)) else None

    # The producer's own events

    def open(self, transfer_id: str, consumer: EngineId, now: float) -> None:
        """A consumer asks for a prompt: COMPUTING, and its lease starts.

        Raises:
            InvalidTransition: the id is in use or was used, or the consumer has already given up.
        """
        if source := self._active.get(transfer_id):
            raise InvalidTransition(f"transfer {transfer_id} is already {source.state}: {source.tell()}")
        if ended := self._ended.get(transfer_id):
            raise InvalidTransition(f"transfer {transfer_id} is over, a retry needs a new id: {ended.story}")
        source = Source(transfer_id, consumer, now, self.lease_s)
        parked = self._parked.pop(transfer_id, None)
        if parked and parked.consumer != consumer:
            self.counters["acks_stale"] += len(parked.acks)
        elif parked and len(parked.acks) == parked.world_size:
            source.acks, source.world_size = parked.acks, parked.world_size
            source.state = SourceState.FAILED
            source.story.append(f"already given up: {_outcomes(parked.acks)}")
            self.counters["sources_refused"] += 1
            self._remember(source)
            raise InvalidTransition(f"transfer {transfer_id} was given up by its consumer before it began")
        elif parked:
            source.acks, source.world_size = parked.acks, parked.world_size
        self._active[transfer_id] = source
        self.counters["sources_opened"] += 1

    def hold(self, transfer_id: str, num_blocks: int, now: float) -> None:
        """COMPUTING → HELD: the prompt has been computed and `num_blocks` blocks belong to the transfer.

        Raises:
            InvalidTransition: the source is not being computed (any more); the blocks stay with the caller.
        """
        source = self._move(transfer_id, SourceState.HELD, f"held {num_blocks} blocks at {now:.3f}")
        source.held_at = now
        source.warn_at = now + self._warn_after_s
        source.num_blocks = num_blocks
        self.counters["sources_held"] += 1

    def fail(self, transfer_id: str, detail: str, now: float) -> list[Instruction]:
        """COMPUTING → FAILED: the producer cannot or need not compute it. Failing twice changes nothing.

        Raises:
            InvalidTransition: the source is or was held, or was never opened.
        """
        if transfer_id not in self._active and self.state(transfer_id) is SourceState.FAILED:
            return []
        return [self._end(transfer_id, SourceState.FAILED, detail, now)]

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
        """Rank `rank` of the consumer's `world_size` ranks needs the blocks no more, whatever the outcome."""
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
        if source.state is SourceState.COMPUTING:
            detail = f"given up by the consumer while it was computed: {_outcomes(source.acks)}"
            return status, [self._end(transfer_id, SourceState.FAILED, detail, now)]
        return status, [self._end(transfer_id, SourceState.RELEASED, _outcomes(source.acks), now)]

    # Time

    def reap(self, now: float) -> list[Instruction]:
        """End every source whose lease is over, warn of old ones, drop parked ACKs that nothing came for."""
        instructions: list[Instruction] = []
        for source in list(self._active.values()):
            if source.lease.expired(now):
                instructions.append(self._expire(source, now))
            elif now >= source.warn_at and source.held_at is not None:
                age = now - source.held_at
                source.warn_at = now + age
                self.counters["sources_long_held"] += 1
                instructions.append(LongHeld(source.transfer_id, source.consumer, age, self.held))
        for transfer_id, parked in list(self._parked.items()):
            if now - parked.since >= self.lease_s:
                del self._parked[transfer_id]
                self.counters["acks_unknown"] += len(parked.acks)
        return instructions

    def close(self, now: float) -> list[Instruction]:
        """The producer goes away: end everything."""
        ends = {SourceState.COMPUTING: SourceState.FAILED, SourceState.HELD: SourceState.EXPIRED}
        return [
            self._end(source.transfer_id, ends[source.state], "the connector was closed", now)
            for source in list(self._active.values())
        ]

    # Proof

    def validate(self) -> None:
        """Check every invariant; for tests, after every event. Raises `AssertionError`."""
        for transfer_id, source in self._active.items():
            story = source.tell()
            assert transfer_id == source.transfer_id, story
            assert source.state in EDGES, f"an ended source is still active: {story}"
            assert (source.held_at is not None) == (source.state is SourceState.HELD), story
            assert source.lease.deadline >= source.opened_at + self.lease_s, f"a lease was shortened: {story}"
            assert len(source.acks) < (source.world_size or 1), f"nobody waits for it, yet it is active: {story}"
            assert transfer_id not in self._ended, f"active and ended: {story}"
            assert transfer_id not in self._parked, f"active and parked: {story}"
        for transfer_id, remembered in self._ended.items():
            assert remembered.state not in EDGES, remembered.story
            assert transfer_id not in self._parked, f"ended and parked: {remembered.story}"
        assert len(self._parked) <= self._max_parked
        assert len(self._ended) <= self._max_remembered
        ended = sum(self.counters[f"sources_{outcome}"] for outcome in OUTCOMES.values())
        assert self.counters["sources_opened"] == len(self._active) + ended, dict(self.counters)

    # Inside

    def _move(self, transfer_id: str, to: SourceState, story: str) -> Source:
        source = self._active.get(transfer_id)
        if source is None:
            ended = self._ended.get(transfer_id)
            known = f"is {ended.state}: {ended.story}" if ended else "was never opened, or ended long ago"
            raise InvalidTransition(f"transfer {transfer_id} cannot become {to}; it {known}")
        if to not in EDGES[source.state]:
            raise InvalidTransition(f"transfer {transfer_id} is {source.state}, not to become {to}: {source.tell()}")
        source.state = to
        source.story.append(story)
        return source

    def _end(self, transfer_id: str, to: SourceState, detail: str, now: float) -> Ended:
        source = self._move(transfer_id, to, f"{to} at {now:.3f}: {detail}")
        source.held_at = None
        del self._active[transfer_id]
        self.counters[f"sources_{to}"] += 1
        self._remember(source)
        return Ended(transfer_id, OUTCOMES[to], detail, now - source.opened_at)

    def _expire(self, source: Source, now: float) -> Ended:
        age = now - source.opened_at
        detail = f"{source.consumer} has not renewed within {source.lease.lease_s:g} s (age {age:.1f} s)"
        self.counters[f"leases_expired_{source.state}"] += 1
        to = SourceState.EXPIRED if source.state is SourceState.HELD else SourceState.FAILED
        return self._end(source.transfer_id, to, detail, now)

    def _remember(self, source: Source) -> None:
        self._ended[source.transfer_id] = _Remembered(
            source.state, source.consumer, frozenset(source.acks), source.tell()
        )
        while len(self._ended) > self._max_remembered:
            self._ended.popitem(last=False)

    def _ack_counted(self, status: AckStatus) -> AckStatus:
        self.counters[f"acks_{status}"] += 1
        return status

    def _ack_without_source(
        self, transfer_id: str, consumer: EngineId, rank: int, world_size: int, outcome: str, now: float
    ) -> AckStatus:
        if ended := self._ended.get(transfer_id):
            repeated = ended.consumer == consumer and rank in ended.ranks
            return self._ack_counted("duplicate" if repeated else "stale")
        parked = self._parked.get(transfer_id)
        if parked is None:
            if len(self._parked) == self._max_parked:
                _, dropped = self._parked.popitem(last=False)
                self.counters["acks_dropped"] += len(dropped.acks)
            parked = self._parked[transfer_id] = _Parked(consumer, world_size, {}, now)
        elif parked.consumer != consumer:
            return self._ack_counted("stale")
        elif parked.world_size != world_size:
            return self._ack_counted("invalid")
        elif rank in parked.acks:
            return self._ack_counted("duplicate")
        parked.acks[rank] = outcome
        return self._ack_counted("parked")


def _outcomes(acks: dict[int, str]) -> str:
    return ", ".join(sorted(set(acks.values())))
