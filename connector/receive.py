"""One WRITE, seen from its consumer: from admission to the ACK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from connector.destination import DestinationRef, check_destination
from connector.errors import ImportFailed, InvalidTransition, PeerLostError
from connector.importer import Importer, ImportOutcome
from connector.link import Link
from connector.pages import PoolGeometry
from connector.pull import Imported


class Receive:
    """Made by `Connector.receive`: `destination` is to be put into the request to the producer.

    From then on the blocks belong to the import, until `on_settled` is called, exactly once, on the event loop. Every
    path has to end in `landed` or `cancel`: the producer may write until it has said that it does not, or is gone.
    """

    def __init__(
        self,
        destination: DestinationRef,
        link: Link,
        importer: Importer,
        geometry: PoolGeometry,
        clock: Callable[[], float],
        on_settled: Callable[[ImportOutcome], None],
    ) -> None:
        blocks = check_destination(destination, geometry, str(destination.consumer))
        peer = link.data_peer
        if peer is None:
            raise PeerLostError(f"{link.peer} cannot be reached at the moment")
        self.destination = destination
        self._link = link
        self._importer = importer
        self._clock = clock
        self._transport = peer[0]
        self._bytes = _num_bytes(geometry, destination)
        transfer_id = destination.transfer_id

        def settle(outcome: ImportOutcome) -> None:
            try:
                on_settled(outcome)
            finally:
                link.acknowledge(transfer_id, outcome.outcome)

        link.begin(transfer_id)
        try:
            self._settled = importer.expect(
                transfer_id, peer, blocks, self._bytes, settle, lambda: link.stop_writing(transfer_id)
            )
        except InvalidTransition:
            link.acknowledge(transfer_id, "failed")
            raise

    @property
    def transfer_id(self) -> str:
        """The transfer's."""
        return self.destination.transfer_id

    async def landed(self) -> Imported:
        """The producer has computed everything: wait for the last page, for as long as a READ may take.

        Cancelling the waiting task raises `CancelledError` at once; the import settles in the background.

        Raises:
            ImportFailed: there are no usable pages; `reason` is one of `connector.Reason`.
        """
        started = self._clock()
        self._importer.limit(self.transfer_id)
        try:
            outcome = await asyncio.shield(self._settled)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if outcome.outcome != "published":
            raise ImportFailed(outcome.reason, outcome.detail)
        return Imported(
            num_tokens=self.destination.num_tokens - self.destination.local_tokens,
            bytes=self._bytes,
            operations=0,
            seconds=self._clock() - started,
            transport=self._transport,
        )

    def cancel(self) -> None:
        """Nobody wants the pages any more. The blocks stay quarantined until the producer has stopped or is gone.
        Harmless when the import is over."""
        self._importer.cancel(self.transfer_id)


def _num_bytes(geometry: PoolGeometry, destination: DestinationRef) -> int:
    return sum(
        len(ids) * sum(page.page_bytes for page in geometry.group(name).layers)
        for name, ids in destination.blocks.items()
    )
