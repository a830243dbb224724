"""Pages from one worker's pool to another's: what a prefill or decode worker needs of the hand-off.

A worker makes one `Connector` over its page pool. Its producer half (`Connector.sources`) keeps blocks for consumers
until they have ACKed; its consumer half connects `Link`s to producers and pulls pages over them.
"""

from __future__ import annotations

from connector.compatibility import CompatibilityRecord
from connector.config import ConnectorConfig
from connector.connector import Connector, ConnectorStats, LinkStats
from connector.destination import DestinationRef
from connector.early import CANCELS_REMEMBERED_S
from connector.errors import (
    ConnectorError,
    HandshakeError,
    ImportFailed,
    IncompatibleError,
    InvalidTransition,
    ListenerError,
    OutOfBoundsError,
    PeerLostError,
    PlanError,
    RegistrationError,
    TransportError,
    UnreachableError,
    WireError,
    WrongIncarnationError,
)
from connector.identity import EngineId, new_engine_id, new_transfer_id
from connector.importer import ImportOutcome
from connector.imports import Reason
from connector.link import Link
from connector.listener import Listener, Listeners
from connector.memory import PoolMemory
from connector.pages import (
    LAYOUTS,
    GroupPages,
    GroupSpec,
    LayerPages,
    PoolGeometry,
    StateSpec,
    block_bytes,
    build_geometry,
)
from connector.ports import Endpoint, ListenOn
from connector.pull import Imported, Pull
from connector.receive import Receive
from connector.sources import SourceEnd, SourceRef, Sources
from connector.transport.base import Memory

__all__ = [
    "CANCELS_REMEMBERED_S",
    "LAYOUTS",
    "CompatibilityRecord",
    "Connector",
    "ConnectorConfig",
    "ConnectorError",
    "ConnectorStats",
    "DestinationRef",
    "Endpoint",
    "EngineId",
    "GroupPages",
    "GroupSpec",
    "HandshakeError",
    "ImportFailed",
    "ImportOutcome",
    "Imported",
    "IncompatibleError",
    "InvalidTransition",
    "LayerPages",
    "Link",
    "LinkStats",
    "ListenOn",
    "Listener",
    "ListenerError",
    "Listeners",
    "Memory",
    "OutOfBoundsError",
    "PeerLostError",
    "PlanError",
    "PoolGeometry",
    "PoolMemory",
    "Pull",
    "Reason",
    "Receive",
    "RegistrationError",
    "SourceEnd",
    "SourceRef",
    "Sources",
    "StateSpec",
    "TransportError",
    "UnreachableError",
    "WireError",
    "WrongIncarnationError",
    "block_bytes",
    "build_geometry",
    "new_engine_id",
    "new_transfer_id",
]
