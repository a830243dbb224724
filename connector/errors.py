"""Everything the connector raises.

ConnectorError
├── ListenerError            a listener could not be allocated (names the host and port)
├── WireError                the control connection broke: a malformed, oversized or late frame, or its end
├── HandshakeError           the two ends do not agree, or one of them is not who it says
│   ├── IncompatibleError    carries the fields that differ, with both values
│   └── WrongIncarnationError  another incarnation answers: the peer that was meant is gone for good
├── TransportError
│   ├── RegistrationError    memory could not be made reachable
│   ├── UnreachableError     no way to that peer with this transport
│   ├── OutOfBoundsError     a run leaves its region; nothing was posted
│   └── PeerLostError        the peer is down or fenced
├── PlanError                a transfer that the two geometries do not allow
├── InvalidTransition        a state machine was told something impossible; carries the transfer's story
└── ImportFailed             an import ended without pages; carries the reason
"""

from __future__ import annotations

from collections.abc import Mapping


class ConnectorError(Exception):
    """Base of everything this package raises on purpose."""


class ListenerError(ConnectorError):
    """A listener could not be allocated."""


class WireError(ConnectorError):
    """The control connection broke: a malformed, oversized or late frame, or its end."""


class HandshakeError(ConnectorError):
    """The two ends do not agree, or one of them is not who it says it is."""


class IncompatibleError(HandshakeError):
    """The compatibility records differ. `differences` maps a field to (ours, theirs)."""

    def __init__(self, peer: str, differences: Mapping[str, tuple[object, object]]) -> None:
        listed = "; ".join(
            f"{field}: ours {ours!r}, theirs {theirs!r}" for field, (ours, theirs) in differences.items()
        )
        super().__init__(f"{peer} is incompatible with this worker ({listed}); start both with the same settings")
        self.peer = peer
        self.differences = differences


class WrongIncarnationError(HandshakeError):
    """Another incarnation answers at that address: the peer that was meant is gone for good."""


class TransportError(ConnectorError):
    """Base of what a transport raises."""


class RegistrationError(TransportError):
    """Memory could not be made reachable."""


class UnreachableError(TransportError):
    """There is no way to that peer with this transport."""


class OutOfBoundsError(TransportError):
    """A run leaves its region; nothing was posted."""


class PeerLostError(TransportError):
    """The peer is down or has been fenced."""


class PlanError(ConnectorError):
    """The two geometries do not allow this transfer."""


class InvalidTransition(ConnectorError):
    """A state machine was told something that cannot happen. The message tells the transfer's story."""


class ImportFailed(ConnectorError):
    """An import ended without usable pages. `reason` is a word for counters and policies."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
