"""The state machine of one listener: which port is tried next, when it may be published, and what a refusal means.

    TRYING ──busy, there are more──► TRYING ──listen succeeded──► LISTENING ──► CLOSED
       └──busy, no more; not allowed; not this host's──► REFUSED

A port counts as taken only once `listen` has succeeded on a socket that is then kept, and only then is there an
endpoint to publish. There is no I/O here.
"""

from __future__ import annotations

import errno
from enum import StrEnum

import msgspec

from connector.errors import ListenerError


class Endpoint(msgspec.Struct, frozen=True):
    """Where a listener can be reached."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ListenOn(msgspec.Struct, frozen=True):
    """One wanted listener: `ports` are tried in order, and 0 means any free port."""

    host: str
    ports: range


class ListenerState(StrEnum):
    """See the module's drawing."""

    TRYING = "trying"
    LISTENING = "listening"
    REFUSED = "refused"
    CLOSED = "closed"


class PortSearch:
    """One listener's way from a wish to an endpoint."""

    def __init__(self, wish: ListenOn) -> None:
        self.state = ListenerState.TRYING
        self.endpoint: Endpoint | None = None
        self._wish = wish
        self._tried = 0

    def next_port(self) -> int:
        """The port to bind and listen on now.

        Raises:
            ListenerError: the search is over.
        """
        if self.state is not ListenerState.TRYING:
            raise ListenerError(f"the listener on {self._wish.host} is {self.state}; nothing is allocated any more")
        return self._wish.ports[self._tried]

    def refused(self, error: OSError) -> None:
        """That port could not be had; another one may be tried, or this raises.

        Raises:
            ListenerError: there is no other, or no other would do; the message names host and port.
        """
        port = self.next_port()
        self._tried += 1
        if error.errno == errno.EADDRINUSE and self._tried < len(self._wish.ports):
            return
        self.state = ListenerState.REFUSED
        raise ListenerError(self._refusal(port, error)) from error

    def listening(self, port: int) -> Endpoint:
        """`listen` has succeeded on a socket that is kept, which has this `port`: it may be published."""
        self.next_port()
        self.state = ListenerState.LISTENING
        self.endpoint = Endpoint(self._wish.host, port)
        return self.endpoint

    def close(self) -> None:
        """The socket is closed. Twice is harmless."""
        self.state = ListenerState.CLOSED
        self.endpoint = None

    def _refusal(self, port: int, error: OSError) -> str:
        host, ports = self._wish.host, self._wish.ports
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE and len(ports) > 1:
            return f"every port from {ports[0]} to {ports[-1]} on {host} is in use; widen connector.port_range"
        if error.errno == errno.EADDRINUSE:
            busy = f"port {port} on {host} is in use; choose another one ({where})"
            return busy if port else f"no free port on {host}"
        if error.errno == errno.EACCES:
            return f"this user may not listen on {where}; ports below 1024 need privileges"
        if error.errno == errno.EADDRNOTAVAIL:
            return f"cannot listen on {where}: {host} is not an address of this host; set connector.host to one"
        return f"cannot listen on {where}: {error.strerror or error}"
