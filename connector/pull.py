"""One transfer, seen from its consumer: from admission to the ACK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from connector.errors import ImportFailed, InvalidTransition, PlanError
from connector.importer import Importer, ImportOutcome
from connector.imports import PeerKey, Reason
from connector.link import Link
from connector.pages import PoolGeometry
from connector.plan import Plan, plan_read
from connector.sources import SourceRef


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What has arrived. `seconds` is from the first post to the last completion, of a WRITE since it was waited
    for. `operations` are 0 where the producer wrote."""

    num_tokens: int
    bytes: int
    operations: int
    seconds: float
    transport: str


class Pull:
    """Made by `Connector.begin`; from then on the lease of the transfer is renewed, until the ACK.

    Every path has to end in `read` or `release`: only an ACK frees the producer's blocks while this worker is alive.
    """

    def __init__(
        self,
        transfer_id: str,
        link: Link,
        importer: Importer,
        geometry: PoolGeometry,
        clock: Callable[[], float],
        answer_s: float,
    ) -> None:
        self.transfer_id = transfer_id
        self._link = link
        self._importer = importer
        self._geometry = geometry
        self._clock = clock
        self._answer_s = answer_s
        self._lease = link.begin(transfer_id)
        self._reading = False
        self._over = False

    async def read(
        self,
        source: SourceRef,
        destination: Mapping[str, Sequence[int]],
        on_settled: Callable[[ImportOutcome], None],
        local_tokens: int = 0,
    ) -> Imported:
        """READ the source's pages into the destination's blocks, which belong to the import until `on_settled`.

        The consumer has the first `local_tokens` tokens already, whole blocks, and names blocks for the others only.

        `on_settled` is called exactly once, on the event loop, when every operation is terminal or fenced: only then
        may the caller free or reuse the destination, whatever this method did before. It is also called when nothing
        could be posted. Cancelling the waiting task raises `CancelledError` at once; the import settles in the
        background. The ACK to the producer follows the settling by itself.

        Raises:
            ImportFailed: there are no usable pages; `reason` is one of `connector.sink.Reason`.
            InvalidTransition: this pull was read or released before, or a destination block still belongs to another
                import; `on_settled` is then never called.
        """
        if self._reading or self._over:
            raise InvalidTransition(f"transfer {self.transfer_id} was read or released already; a retry needs a new id")
        self._reading = True

        def settle(outcome: ImportOutcome) -> None:
            try:
                on_settled(outcome)
            finally:
                self._acknowledge(outcome.outcome)

        try:
            peer, plan = self._plan(source, destination, local_tokens)
        except ImportFailed as refused:
            settle(
                ImportOutcome(
                    transfer_id=self.transfer_id, outcome="failed", reason=refused.reason, detail=refused.detail
                )
            )
            raise
        started = self._clock()
        try:
            settled = self._importer.post(self.transfer_id, peer, plan, self._lease, settle)
        except InvalidTransition:
            self._acknowledge("failed")
            raise
        try:
            outcome = await settled
        except asyncio.CancelledError:
            self._importer.cancel(self.transfer_id)
            raise
        if outcome.outcome != "published":
            raise ImportFailed(outcome.reason, outcome.detail)
        return Imported(
            num_tokens=plan.num_tokens,
            bytes=plan.total_bytes,
            operations=plan.operations,
            seconds=self._clock() - started,
            transport=peer[0],
        )

    async def release(self, outcome: str) -> None:
        """Give the source up without pages: the client is gone, nothing is missing, … `outcome` is a word for the logs.

        Harmless after `read` and when called again; a read that is still running is cancelled. Waits a bounded time for
        the producer's confirmation and never raises for a producer that is gone: the ACK is delivered in the
        background, or the lease ends.
        """
        if self._over:
            return
        if self._reading:
            self._importer.cancel(self.transfer_id)
        else:
            self._acknowledge(outcome)
        await self._link.confirmed(self.transfer_id, self._answer_s)

    def _acknowledge(self, outcome: str) -> None:
        self._over = True
        self._link.acknowledge(self.transfer_id, outcome)

    def _plan(
        self, source: SourceRef, destination: Mapping[str, Sequence[int]], local_tokens: int
    ) -> tuple[PeerKey, Plan]:
        if (source.transfer_id, source.producer) != (self.transfer_id, self._link.peer):
            raise ImportFailed(
                Reason.PLAN_REFUSED,
                f"transfer {source.transfer_id} of {source.producer} was offered to transfer {self.transfer_id} "
                f"of {self._link.peer}",
            )
        try:
            plan = plan_read(
                source=self._link.geometry,
                source_blocks=source.blocks,
                destination=self._geometry,
                destination_blocks=destination,
                num_tokens=source.num_tokens,
                local_tokens=local_tokens,
            )
        except PlanError as error:
            raise ImportFailed(Reason.PLAN_REFUSED, str(error)) from error
        if self._lease.expired(self._clock()):
            raise ImportFailed(Reason.SOURCE_EXPIRED, "the lease was not renewed in time, so the source may be gone")
        peer = self._link.data_peer
        if peer is None:
            raise ImportFailed(Reason.PEER_LOST, f"{self._link.peer} cannot be read from at the moment")
        return peer, plan
