"""The consumers that a producer knows: how to speak to them, and how to reach their memory.

A consumer's control connection comes and goes; its memory stays where it is for as long as the process lives. The data
connection is therefore made once for each incarnation, when the first WRITE needs it, and kept until it is fenced.
"""

from __future__ import annotations

import msgspec

from connector.connection import Connection
from connector.errors import PeerLostError
from connector.identity import EngineId
from connector.imports import PeerKey
from connector.lanes import Lanes
from connector.pages import PoolGeometry
from connector.wire import Frame, Record


class _Known(msgspec.Struct):
    record: Record
    connection: Connection | None = None
    data_peer: PeerKey | None = None


class Consumers:
    """By incarnation. Lives on the connector's event loop."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._known: dict[EngineId, _Known] = {}

    def arrived(self, consumer: EngineId, record: Record, connection: Connection) -> None:
        """It has shaken hands. Earlier incarnations of the same worker are gone."""
        for other in [known for known in self._known if known.name == consumer.name and known != consumer]:
            self._forget(other, f"{consumer} has taken its place")
        known = self._known.setdefault(consumer, _Known(record))
        if known.connection is not None:
            known.connection.abort()  # one at a time: the new one is the one that it uses
        known.record, known.connection = record, connection

    def left(self, consumer: EngineId, connection: Connection) -> None:
        """This connection to it has ended."""
        known = self._known.get(consumer)
        if known is not None and known.connection is connection:
            known.connection = None
            if known.data_peer is None:
                del self._known[consumer]

    def reach(self, consumer: EngineId) -> tuple[PeerKey, PoolGeometry]:
        """How its memory is reached, and how its pages lie.

        Raises:
            PeerLostError: it has no connection to this worker, so that nobody could tell it when its pages are there.
            UnreachableError: no transport reaches its memory.
        """
        known = self._known.get(consumer)
        if known is None or known.connection is None:
            raise PeerLostError(f"{consumer} has no control connection to this worker; it has to connect first")
        if known.data_peer is None:
            known.data_peer = self._lanes.connect(known.record.transports, str(consumer))
        return known.data_peer, known.record.geometry

    def say(self, consumer: EngineId, frame: Frame) -> None:
        """Tell it now, if it is connected."""
        known = self._known.get(consumer)
        if known is not None and known.connection is not None:
            known.connection.say(frame)

    def lost(self, peer: PeerKey) -> None:
        """Its data connection is of no use any more; the next WRITE makes a new one."""
        for consumer, known in list(self._known.items()):
            if known.data_peer == peer:
                known.data_peer = None
                if known.connection is None:
                    del self._known[consumer]

    def _forget(self, consumer: EngineId, cause: str) -> None:
        known = self._known.pop(consumer)
        if known.connection is not None:
            known.connection.abort()
        if known.data_peer is not None:
            self._lanes.fence(known.data_peer, cause)
