"""Carries out what the sink decides: posts to the transports, listens to them, fences, tells the owners.

Every method is called on the connector's event loop, and so are the transports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import assert_never

import msgspec

from connector.errors import ImportFailed, PeerLostError, TransportError
from connector.lease import Lease
from connector.plan import Plan
from connector.sink import Fence, Instruction, Landed, Outcome, PeerKey, Reason, Settled, Sink
from connector.transport.base import Completed, PeerDown, Transport

logger = logging.getLogger(__name__)


class ImportOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an import ended: it owns no destination block any more. `reason` is empty when it was published."""

    transfer_id: str
    outcome: Outcome
    reason: str
    detail: str


class _Owner(msgspec.Struct):
    """Who waits for an import."""

    settled: asyncio.Future[ImportOutcome]
    on_settled: Callable[[ImportOutcome], None]
    num_bytes: int
    counter: str


class Importer:
    """Every READ of this worker.

    `on_peer_lost` is told after a peer has been fenced, `on_fault` of a mistake of this worker or a broken transport.
    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        sink: Sink,
        clock: Callable[[], float],
        *,
        timeout_s: float,
        on_peer_lost: Callable[[PeerKey, str], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._transports = transports
        self._sink = sink
        self._clock = clock
        self._timeout_s = timeout_s
        self._on_peer_lost = on_peer_lost
        self._on_fault = on_fault
        self._owners: dict[str, _Owner] = {}
        self._instructions: deque[Instruction] = deque()
        self._carrying_out = False
        self._broken: set[str] = set()

    def start(self) -> None:
        """Listen to the transports."""
        loop = asyncio.get_running_loop()
        for name, transport in self._transports.items():
            loop.add_reader(transport.fileno(), self._poll, name)

    def close(self) -> None:
        """Stop listening, close the transports, which fences every peer, and settle what is left.

        A transport that cannot be closed raises; whoever waits for an import of it fails then, but its blocks stay
        taken: nothing proves that the writes have stopped.
        """
        loop = asyncio.get_running_loop()
        try:
            with contextlib.ExitStack() as every:
                for transport in self._transports.values():
                    loop.remove_reader(transport.fileno())
                    every.callback(transport.close)
            for peer in self._sink.peers():
                self._carry_out(self._sink.fenced(peer, "the connector was closed", self._clock()))
        finally:
            for owner in self._owners.values():
                if not owner.settled.done():
                    owner.settled.set_exception(ImportFailed(Reason.PEER_LOST, "its transport could not be closed"))

    @property
    def active(self) -> int:
        """Imports that own blocks."""
        return self._sink.active

    def post(
        self,
        transfer_id: str,
        peer: PeerKey,
        plan: Plan,
        lease: Lease | None,
        on_settled: Callable[[ImportOutcome], None],
    ) -> asyncio.Future[ImportOutcome]:
        """Start a READ. The future is done after `on_settled` was called, exactly once, possibly before this returns.

        Raises:
            InvalidTransition: the transfer is being imported, or a destination block belongs to another import;
                `on_settled` is then never called.
        """
        now = self._clock()
        self._sink.plan(transfer_id, peer, plan.blocks, lease=lease, deadline=now + self._timeout_s, now=now)
        settled = asyncio.get_running_loop().create_future()
        counter = "bytes_measured" if lease is None else "bytes_imported"
        self._owners[transfer_id] = _Owner(settled, on_settled, plan.total_bytes, counter)
        name, number = peer
        try:
            for batch in plan.batches:
                posted = self._transports[name].post(
                    number, "read", batch.local_region, batch.remote_region, batch.runs
                )
                self._sink.posted(transfer_id, (name, posted), self._clock())
        except TransportError as error:
            reason = Reason.PEER_LOST if isinstance(error, PeerLostError) else Reason.TRANSFER_ERROR
            self._carry_out(self._sink.post_failed(transfer_id, reason, str(error), self._clock()))
        else:
            self._carry_out(self._sink.posting_done(transfer_id, self._clock()))
        return settled

    def cancel(self, transfer_id: str) -> None:
        """Nobody wants this import any more; its blocks stay its own until it has settled."""
        self._carry_out(self._sink.cancel(transfer_id, self._clock()))

    def source_lost(self, transfer_id: str, detail: str) -> None:
        """The producer says that the source has ended."""
        self._carry_out(self._sink.source_lost(transfer_id, detail, self._clock()))

    def fence(self, peer: PeerKey, cause: str) -> None:
        """Tear the connection to a peer down by force; everything it still had in flight settles."""
        self._carry_out(self._sink.peer_down(peer, cause, self._clock()))

    def tick(self) -> None:
        """Give up what has taken too long."""
        self._carry_out(self._sink.tick(self._clock()))

    def _poll(self, name: str) -> None:
        if name in self._broken:
            return
        try:
            self._take_events(name)
        except Exception as error:
            self._broken.add(name)
            asyncio.get_running_loop().remove_reader(self._transports[name].fileno())
            self._on_fault(error)

    def _take_events(self, name: str) -> None:
        for event in self._transports[name].poll():
            now = self._clock()  # read after the completion: what has completed by now was read before now
            match event:
                case Completed(batch=batch, error=error):
                    self._carry_out(self._sink.completed((name, batch), error, now))
                case PeerDown(peer=peer, cause=cause):
                    logger.warning("%s reports that peer %d is down: %s", name, peer, cause)
                    self._carry_out(self._sink.peer_down((name, peer), cause, now))
                case _:
                    assert_never(event)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        """One instruction after the other, also when carrying one out brings new ones."""
        self._instructions.extend(instructions)
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._instructions:
                match self._instructions.popleft():
                    case Landed(transfer_id):
                        self._instructions.extend(self._sink.publish(transfer_id, self._clock()))
                    case Settled() as settled:
                        self._tell(settled)
                    case Fence(peer, cause):
                        self._fence(peer, cause)
                    case never:
                        assert_never(never)
        finally:
            self._carrying_out = False

    def _fence(self, peer: PeerKey, cause: str) -> None:
        name, number = peer
        self._transports[name].fence(number)
        self._poll(name)
        self._carry_out(self._sink.fenced(peer, cause, self._clock()))
        self._on_peer_lost(peer, cause)

    def _tell(self, settled: Settled) -> None:
        owner = self._owners.pop(settled.transfer_id)
        if settled.outcome == "published":
            self.counters[owner.counter] += owner.num_bytes
        outcome = ImportOutcome(
            transfer_id=settled.transfer_id,
            outcome=settled.outcome,
            reason=settled.reason or "",
            detail=settled.detail,
        )
        try:
            owner.on_settled(outcome)
        except Exception:  # the owner's mistake must not keep other imports from settling
            logger.exception("the owner of import %s failed to take its end", settled.transfer_id)
        if not owner.settled.done():
            owner.settled.set_result(outcome)
