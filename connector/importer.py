"""Carries out what the sink decides: posts reads, fences, tells the owners. Lives on the connector's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import assert_never

import msgspec

from connector.errors import ImportFailed, PeerLostError, TransportError
from connector.imports import (
    BatchKey,
    Fence,
    Instruction,
    Landed,
    Outcome,
    PeerKey,
    Reason,
    Settled,
    StopWriting,
)
from connector.lanes import Lanes
from connector.lease import Lease
from connector.plan import Plan
from connector.sink import Sink
from connector.transport.base import Offsets

logger = logging.getLogger(__name__)

QUIET_S = {"ucx": 5.0, "nixl": 5.0}
"""How long what a dead producer had written may still arrive, by transport. Bytes that lie in this host's sockets are
moved by UCX's own progress, which the fence of our connection does not stop; it takes milliseconds."""


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
    stop: Callable[[], None] | None = None


class Importer:
    """Every import of this worker.

    `on_peer_lost` is told before a peer is fenced: nothing new may be begun with it, since an import that begins after
    the peer's death would wait for the death.
    """

    def __init__(
        self,
        lanes: Lanes,
        sink: Sink,
        clock: Callable[[], float],
        *,
        timeout_s: float,
        on_peer_lost: Callable[[PeerKey, str], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._lanes = lanes
        self._sink = sink
        self._clock = clock
        self._timeout_s = timeout_s
        self._on_peer_lost = on_peer_lost
        self._owners: dict[str, _Owner] = {}
        self._instructions: deque[Instruction] = deque()
        self._carrying_out = False

    def close(self, error: BaseException | None = None) -> None:
        """Settle what is left; the transports have been closed, which fenced every peer and took the memory back.

        With `error` one of them could not be closed. Whoever waits for an import fails then, but its blocks stay taken:
        nothing proves that the writes have stopped.
        """
        if error is None:
            for peer in self._sink.peers():
                self.gone(peer, "the connector was closed", quiet_s=0.0)
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
        try:
            for batch in plan.batches:
                self._sink.posted(transfer_id, self._lanes.post(peer, "read", batch, self), self._clock())
        except TransportError as error:
            reason = Reason.PEER_LOST if isinstance(error, PeerLostError) else Reason.TRANSFER_ERROR
            self._carry_out(self._sink.post_failed(transfer_id, reason, str(error), self._clock()))
        else:
            self._carry_out(self._sink.posting_done(transfer_id, self._clock()))
            self._lanes.look(peer)
        return settled

    def expect(
        self,
        transfer_id: str,
        peer: PeerKey,
        blocks: Mapping[str, Offsets],
        num_bytes: int,
        on_settled: Callable[[ImportOutcome], None],
        stop: Callable[[], None],
    ) -> asyncio.Future[ImportOutcome]:
        """Hand blocks to a WRITE that a producer is about to be asked for. `stop` asks it to give up. Otherwise as
        `post`; whoever asks has to cancel it when the answer does not come in time."""
        self._sink.expect(transfer_id, peer, blocks, now=self._clock())
        settled = asyncio.get_running_loop().create_future()
        self._owners[transfer_id] = _Owner(settled, on_settled, num_bytes, "bytes_imported", stop)
        return settled

    def limit(self, transfer_id: str) -> None:
        """The producer has computed everything: from now on the WRITE has the time of a READ."""
        self._sink.limit(transfer_id, self._clock() + self._timeout_s)

    def committed(self, transfer_id: str) -> None:
        """The producer says that everything has arrived."""
        self._carry_out(self._sink.committed(transfer_id, self._clock()))

    def not_written(self, transfer_id: str, detail: str) -> None:
        """The producer says that it will not finish, and has stopped."""
        self._carry_out(self._sink.not_written(transfer_id, detail, self._clock()))

    def moved(self, before: PeerKey, peer: PeerKey) -> None:
        """The same process is reached by another data connection."""
        self._sink.moved(before, peer)

    def stop_writes(self, peer: PeerKey) -> list[asyncio.Future[ImportOutcome]]:
        """Give up every WRITE of this peer; the futures are done when it has stopped, or has ended."""
        found = [(transfer_id, owner) for transfer_id, owner in self._owners.items() if owner.stop is not None]
        found = [(transfer_id, owner) for transfer_id, owner in found if self._sink.peer(transfer_id) == peer]
        for transfer_id, _ in found:
            self.cancel(transfer_id)
        return [owner.settled for _, owner in found]

    def gone(self, peer: PeerKey, cause: str, quiet_s: float | None = None) -> None:
        """The process behind this data connection has ended, whatever the transport says."""
        quiet_s = QUIET_S.get(peer[0], 0.0) if quiet_s is None else quiet_s
        self._carry_out(self._sink.peer_down(peer, cause, self._clock(), gone=True, quiet_s=quiet_s))
        if not self._lanes.may_touch(peer):  # otherwise its fence is still to be told of
            self._carry_out(self._sink.fenced(peer, cause, self._clock()))

    def cancel(self, transfer_id: str) -> None:
        """Nobody wants this import any more; its blocks stay its own until it has settled."""
        self._carry_out(self._sink.cancel(transfer_id, self._clock()))

    def source_lost(self, transfer_id: str, detail: str) -> None:
        """The producer says that the source has ended."""
        self._carry_out(self._sink.source_lost(transfer_id, detail, self._clock()))

    def fence(self, peer: PeerKey, cause: str) -> None:
        """Tear the connection to a peer down by force; everything it still had in flight settles."""
        self._carry_out(self._sink.peer_down(peer, cause, self._clock(), gone=False))

    def tick(self) -> None:
        """Give up what has taken too long."""
        self._carry_out(self._sink.tick(self._clock()))

    # What the lanes tell

    def completed(self, batch: BatchKey, error: str | None) -> None:
        """See `Watcher`. The clock is read after the completion: what has completed by now was read before now."""
        self._carry_out(self._sink.completed(batch, error, self._clock()))

    def peer_down(self, peer: PeerKey, cause: str, gone: bool) -> None:
        """See `Watcher`."""
        quiet_s = QUIET_S.get(peer[0], 0.0)
        self._carry_out(self._sink.peer_down(peer, cause, self._clock(), gone=gone, quiet_s=quiet_s))

    def fenced(self, peer: PeerKey, cause: str) -> None:
        """See `Watcher`."""
        self._carry_out(self._sink.fenced(peer, cause, self._clock()))

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
                        self._on_peer_lost(peer, cause)
                        self._lanes.fence(peer, cause)
                    case StopWriting(transfer_id):
                        stop = self._owners[transfer_id].stop
                        assert stop is not None
                        stop()
                    case never:
                        assert_never(never)
        finally:
            self._carrying_out = False

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
