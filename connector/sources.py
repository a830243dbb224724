"""The producer half of a connector: sources with their callbacks, on the loop's clock.

`connector.source_table` decides; this carries out. Every method is called on the connector's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, assert_never

import msgspec

from connector.consumers import Consumers
from connector.correspondence import check_blocks
from connector.destination import DestinationRef
from connector.errors import InvalidTransition, PlanError
from connector.identity import EngineId
from connector.lanes import Lanes
from connector.pages import PoolGeometry
from connector.pusher import Pusher
from connector.source import AckStatus, Ended, Instruction, LongHeld, Notice, Outcome, RenewStatus, Stop
from connector.source_table import SourceTable
from connector.wire import Frame

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SourceRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a held source's pages lie: the producer's block ids by group, in the order of the tokens.

    The blocks hold the KV of `num_tokens` tokens; the last one may be partly filled.
    """

    transfer_id: str
    producer: EngineId
    blocks: dict[str, list[int]]
    num_tokens: int


class SourceEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A source is over: abort its computation if it runs, free its blocks if it holds some.

    "released": every rank of the consumer has ACKed. "expired": held, and nobody renewed. "failed": it was never held.
    "flushed": a WRITE of which everything has arrived. No operation on the blocks is in flight any more.
    """

    transfer_id: str
    outcome: Outcome
    detail: str


class Sources:
    """What this worker computes and holds for others."""

    def __init__(self, engine_id: EngineId, geometry: PoolGeometry, lease_s: float, clock: Callable[[], float]) -> None:
        self._engine_id = engine_id
        self._geometry = geometry
        self._clock = clock
        self._table = SourceTable(lease_s, warn_after_s=2 * lease_s)
        self._pusher: Pusher | None = None
        self._on_end: dict[str, Callable[[SourceEnd], None]] = {}
        self._on_stop: dict[str, Callable[[str], None]] = {}
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    # For the prefill worker

    def open(self, transfer_id: str, consumer: EngineId, on_end: Callable[[SourceEnd], None]) -> None:
        """Begin a source for `consumer`: COMPUTING, its lease starts now.

        `on_end` is called exactly once, on the event loop, possibly from within `fail` or the connector's `close`.

        Raises:
            InvalidTransition: the id is in use or was used before, the consumer has already given up, or the connector
                was closed; `on_end` is then never called.
        """
        self._require_open(transfer_id)
        self._table.open(transfer_id, consumer, self._clock())
        self._on_end[transfer_id] = on_end
        self._idle.clear()

    def hold(self, transfer_id: str, blocks: Mapping[str, Sequence[int]], num_tokens: int) -> SourceRef:
        """The prompt has been computed: its blocks stay as they are until `on_end`.

        Raises:
            PlanError: the blocks are not a source of `num_tokens` tokens in this pool; the source is still COMPUTING.
            InvalidTransition: the source has ended (`on_end` has been called) or is held already; the blocks stay with
                the caller.
        """
        if set(blocks) != {group.name for group in self._geometry.groups}:
            raise PlanError(
                f"transfer {transfer_id}: blocks of groups {sorted(blocks)} were given, this pool has "
                f"{sorted(group.name for group in self._geometry.groups)}"
            )
        for name, ids in blocks.items():
            check_blocks(self._geometry, name, ids, num_tokens, whose=f"the source {transfer_id}")
        self._table.hold(transfer_id, sum(map(len, blocks.values())), self._clock())
        return SourceRef(
            transfer_id=transfer_id,
            producer=self._engine_id,
            blocks={name: list(ids) for name, ids in blocks.items()},
            num_tokens=num_tokens,
        )

    def open_write(
        self, destination: DestinationRef, on_end: Callable[[SourceEnd], None], on_stop: Callable[[str], None]
    ) -> None:
        """Begin a source whose pages are written to `destination` as they are computed: COMPUTING, its lease starts.

        `on_stop` is called at most once, when nobody wants the pages any more: stop computing. `on_end` is called
        exactly once, when no operation on the source's blocks is in flight any more: free them. Both on the event loop.

        Raises:
            PlanError: these are not blocks of the consumer's pool for that many tokens.
            PeerLostError: the consumer is not connected to this worker.
            UnreachableError: no transport reaches its memory.
            InvalidTransition: as `open`.
        """
        self._require_open(destination.transfer_id)
        self._writer.open(destination)
        self._on_end[destination.transfer_id] = on_end
        self._on_stop[destination.transfer_id] = on_stop
        self._idle.clear()

    def computed(self, transfer_id: str, blocks: Mapping[str, Sequence[int]], layer: int, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens of one layer lies in `blocks`, all of the prompt's: write what has
        become whole. Does nothing for a transfer that has ended or is ending."""
        self._writer.computed(transfer_id, blocks, layer, num_tokens)

    def finish(self, transfer_id: str) -> None:
        """Every layer has been computed: the consumer is told when all of it has arrived."""
        self._writer.finish(transfer_id)

    def fail(self, transfer_id: str, detail: str) -> None:
        """The prompt cannot be computed, or its call was cancelled. Does nothing when it has already failed.

        Raises:
            InvalidTransition: the source is or was held or flushed: then only ACKs and the lease end it.
        """
        self._carry_out(self._table.fail(transfer_id, detail, self._clock()))

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is computed or held any more; False when that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def held(self) -> int:
        """Sources whose blocks are held."""
        return self._table.held

    @property
    def active(self) -> int:
        """Sources being computed or held."""
        return self._table.active

    @property
    def counters(self) -> Counter[str]:
        """Monotonic counts of what happened."""
        return self._table.counters

    # For the connector, its control connections and the reaper

    def attach(self, lanes: Lanes, consumers: Consumers) -> Pusher:
        """From now on pages can be written; the pusher wants to hear what happens on the lanes."""
        self._pusher = Pusher(
            self._engine_id, self._geometry, self._table, lanes, consumers, self._clock, self._carry_out
        )
        return self._pusher

    def cancel(self, transfer_id: str, consumer: EngineId) -> None:
        """The consumer of a WRITE wants it to stop, and to be told when it has."""
        self._carry_out(self._table.cancel(transfer_id, consumer, self._clock()))

    def notices(self, consumer: EngineId) -> list[Frame]:
        """What this consumer has been told and has not acknowledged."""
        return [self._writer.frame(notice) for notice in self._table.notices(consumer)]

    def renew(self, transfer_id: str, consumer: EngineId) -> RenewStatus:
        """A consumer renews one lease."""
        return self._table.renew(transfer_id, consumer, self._clock())

    def ack(self, transfer_id: str, consumer: EngineId, rank: int, world_size: int, outcome: str) -> AckStatus:
        """One rank of a consumer needs the blocks no more."""
        status, instructions = self._table.ack(transfer_id, consumer, rank, world_size, outcome, self._clock())
        self._carry_out(instructions)
        return status

    def reap(self) -> None:
        """End what nobody renews."""
        self._carry_out(self._table.reap(self._clock()))

    def close(self) -> None:
        """End everything; nothing can be opened any more."""
        self._closed = True
        self._carry_out(self._table.close(self._clock()))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Ended():
                    self._end(instruction)
                case Stop(transfer_id, detail):
                    logger.info("source %s stops: %s", transfer_id, detail)
                    self._tell(transfer_id, self._on_stop.pop(transfer_id), detail)
                case Notice():
                    self._writer.notify(instruction)
                case LongHeld(transfer_id, consumer, age_s, held):
                    logger.warning(
                        "source %s is held since %.0f s; %s renews it but does not ACK (%d sources are held)",
                        transfer_id,
                        age_s,
                        consumer,
                        held,
                    )
                case _:
                    assert_never(instruction)
        if not self._table.active:
            self._idle.set()

    def _end(self, end: Ended) -> None:
        level = logging.DEBUG if end.outcome in ("released", "flushed") else logging.WARNING
        logger.log(level, "source %s %s after %.3f s: %s", end.transfer_id, end.outcome, end.age_s, end.detail)
        self._on_stop.pop(end.transfer_id, None)
        if self._pusher is not None:
            self._pusher.ended(end.transfer_id)
        ended = SourceEnd(transfer_id=end.transfer_id, outcome=end.outcome, detail=end.detail)
        self._tell(end.transfer_id, self._on_end.pop(end.transfer_id), ended)

    def _tell(self, transfer_id: str, owner: Callable[[T], None], what: T) -> None:
        try:
            owner(what)
        except Exception:  # the owner's mistake must not keep other sources from ending
            logger.exception("the owner of source %s failed to take its end", transfer_id)

    def _require_open(self, transfer_id: str) -> None:
        if self._closed:
            raise InvalidTransition(f"transfer {transfer_id}: the connector of {self._engine_id} was closed")

    @property
    def _writer(self) -> Pusher:
        if self._pusher is None:
            raise InvalidTransition(f"the connector of {self._engine_id} has not been started; nothing can be written")
        return self._pusher
