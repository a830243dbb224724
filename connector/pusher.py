"""The producer's half of a WRITE: posts pages as they are computed, and tells the consumer how it ended.

What may be posted when is the source table's to say; here is what it takes to do it. Nothing is posted for a transfer
that has ended or is ending, however late its pages come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from connector.consumers import Consumers
from connector.destination import DestinationRef, check_destination
from connector.errors import PlanError, TransportError
from connector.identity import EngineId
from connector.imports import BatchKey, PeerKey
from connector.lanes import Lanes
from connector.pages import PoolGeometry
from connector.source import Instruction, Notice
from connector.source_table import SourceTable
from connector.wire import MAX_DETAIL_LENGTH, Commit, Failed, Frame, Stopped
from connector.write_plan import WritePlanner


class _Write:
    """One WRITE that has not ended."""

    def __init__(self, destination: DestinationRef, geometry: PoolGeometry, peer: PeerKey) -> None:
        self.destination = destination
        self.geometry = geometry
        self.peer = peer
        self.planner: WritePlanner | None = None


class Pusher:
    """See the module. `carry_out` is what the sources do with the table's instructions."""

    def __init__(
        self,
        engine_id: EngineId,
        geometry: PoolGeometry,
        table: SourceTable,
        lanes: Lanes,
        consumers: Consumers,
        clock: Callable[[], float],
        carry_out: Callable[[list[Instruction]], None],
    ) -> None:
        self._engine_id = engine_id
        self._geometry = geometry
        self._table = table
        self._lanes = lanes
        self._consumers = consumers
        self._clock = clock
        self._carry_out = carry_out
        self._writes: dict[str, _Write] = {}

    def open(self, destination: DestinationRef) -> None:
        """Begin a WRITE: COMPUTING.

        Raises:
            PlanError: these are not blocks of the consumer's pool for that many tokens.
            PeerLostError: the consumer is not connected to this worker.
            UnreachableError: no transport reaches its memory.
            InvalidTransition: the id is in use or was used, or the consumer has given up.
        """
        peer, geometry = self._consumers.reach(destination.consumer)
        check_destination(destination, geometry, str(destination.consumer))
        self._table.open(destination.transfer_id, destination.consumer, self._clock(), peer)
        self._writes[destination.transfer_id] = _Write(destination, geometry, peer)

    def computed(self, transfer_id: str, blocks: Mapping[str, Sequence[int]], layer: int, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens of one layer lies in these blocks: post what has become whole.

        A transfer that cannot be posted has failed; one that has ended is left alone.
        """
        if not self._table.may_post(transfer_id):
            self._table.counters["pages_after_the_end"] += 1
            return
        write = self._writes[transfer_id]
        try:
            if write.planner is None:
                write.planner = self._plan(write, blocks)
            for batch in write.planner.computed(layer, num_tokens):
                posted = self._lanes.post(write.peer, "write", batch, self)
                self._table.posted(transfer_id, posted, self._clock())
                self._table.counters["bytes_pushed"] += batch.runs.total_bytes
        except (PlanError, TransportError) as error:
            self._carry_out(self._table.fail(transfer_id, str(error), self._clock()))

    def finish(self, transfer_id: str) -> None:
        """Every layer has been computed: `Commit` follows when all of it has arrived. Does nothing for a transfer that
        has ended meanwhile."""
        if not self._table.may_post(transfer_id):
            return
        write = self._writes[transfer_id]
        planner = write.planner
        if planner is None or not planner.complete:
            detail = "the prompt was said to be computed before all of its pages were handed over"
            self._carry_out(self._table.fail(transfer_id, detail, self._clock()))
            return
        self._carry_out(self._table.computed(transfer_id, self._clock()))
        self._lanes.look(write.peer)

    def ended(self, transfer_id: str) -> None:
        """Nothing of this WRITE is in flight any more."""
        self._writes.pop(transfer_id, None)

    def close(self) -> None:
        """The transports have been closed, which fenced every peer: what is left has failed."""
        for peer in self._table.peers():
            self._carry_out(self._table.fenced(peer, "the connector was closed", self._clock()))

    def notify(self, notice: Notice) -> None:
        """Tell the consumer, if it is connected."""
        self._consumers.say(notice.consumer, self.frame(notice))

    def frame(self, notice: Notice) -> Frame:
        """A notice as it travels."""
        us, consumer, transfer_id = self._engine_id, notice.consumer, notice.transfer_id
        match notice.kind:
            case "commit":
                return Commit(consumer=consumer, producer=us, transfer_id=transfer_id)
            case "failed":
                detail = notice.detail[:MAX_DETAIL_LENGTH]
                return Failed(consumer=consumer, producer=us, transfer_id=transfer_id, detail=detail)
            case "stopped":
                return Stopped(consumer=consumer, producer=us, transfer_id=transfer_id)

    # What the lanes tell

    def completed(self, batch: BatchKey, error: str | None) -> None:
        """See `connector.lanes.Watcher`."""
        self._carry_out(self._table.completed(batch, error, self._clock()))

    def peer_down(self, peer: PeerKey, cause: str, gone: bool) -> None:
        """See `connector.lanes.Watcher`."""
        self._consumers.lost(peer)
        self._carry_out(self._table.peer_down(peer, cause, self._clock()))

    def fenced(self, peer: PeerKey, cause: str) -> None:
        """See `connector.lanes.Watcher`."""
        self._consumers.lost(peer)
        self._carry_out(self._table.fenced(peer, cause, self._clock()))

    def _plan(self, write: _Write, blocks: Mapping[str, Sequence[int]]) -> WritePlanner:
        return WritePlanner(
            source=self._geometry,
            source_blocks=blocks,
            destination=write.geometry,
            destination_blocks=write.destination.blocks,
            num_tokens=write.destination.num_tokens,
            local_tokens=write.destination.local_tokens,
        )
