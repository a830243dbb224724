"""Plain TCP: pages go straight from one pool into the other, as one stream of scattered writes and reads.

UCX has no one-sided operations over TCP and emulates them with fragments that are copied on the way. Here a request
names the pieces, and the kernel gathers their bytes from the pool and scatters them into the peer's. Each end has one
native thread that sleeps while nothing happens, so that a target serves without its interpreter.

Whoever knows an instance's secret may read and write its registered memory. The secret is new for each instance and is
told in its description only, which travels over connections that know the cluster's token; a description is never
logged. The bytes themselves are neither encrypted nor signed, no more than UCX's are.
"""

from __future__ import annotations

import secrets
import socket
import weakref
from typing import Annotated

import msgspec

from connector._native import OutOfBounds, TcpEngine
from connector.errors import ListenerError, OutOfBoundsError, PeerLostError, RegistrationError, UnreachableError
from connector.listener import Listeners
from connector.ports import ListenOn
from connector.transport.base import Completed, Event, Fenced, Memory, Op, PeerDown, Runs
from connector.transport.registration import refusal, why_unusable
from connector.transport.sealed import seal, unseal

SECRET_BYTES = 32
CONNECT_TIMEOUT_S = 10.0
"""How long a connection may take to be made; after that the peer is reported down."""

ANY_PORT = range(1)

Length = Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Description(msgspec.Struct, frozen=True):
    host: str
    port: Port
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    regions: tuple[Length, ...]

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"  # without the secret


def _begin_to_connect(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connecting = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    try:
        connecting.connect(address)
    except BlockingIOError:
        pass  # it goes on in the background
    except BaseException:
        connecting.close()
        raise
    return connecting


class TcpTransport:
    """See the module, and `connector.transport.base.Transport`.

    `host` is bound and told to peers, so that it is never a wildcard; `ports` are tried in order, 0 is any free one.

    Raises:
        RegistrationError: nothing can be listened on there.
    """

    name = "tcp"

    def __init__(self, name: str, host: str = "127.0.0.1", ports: range = ANY_PORT) -> None:
        self._owner = name
        listeners = Listeners()
        try:
            (listener,) = listeners.allocate(ListenOn(host, ports))
            self.endpoint = listener.endpoint
            self._secret = secrets.token_bytes(SECRET_BYTES)
            self._engine = TcpEngine(f"tcp-{name}", listener.socket.detach(), self._secret)
        except (ListenerError, RuntimeError) as error:
            raise RegistrationError(f"{name}: tcp cannot be used: {error}") from error
        # Nothing touches memory any more when it goes, be it that the process ends.
        weakref.finalize(self, self._engine.close)
        self._regions: list[Memory] = []
        self._down: dict[int, bool] = {}
        self._closed = False

    def register(self, memory: Memory) -> int:
        """See `Transport.register`."""
        number = len(self._regions)
        wrong = "the transport is closed" if self._closed else why_unusable(memory)
        if wrong:
            raise refusal(self._owner, self.name, number, memory, wrong)
        self._regions.append(memory)
        return self._engine.register_memory(memory.address, memory.length)

    def describe(self) -> bytes:
        """See `Transport.describe`. It contains the secret: it is for authenticated peers only, and never for a log."""
        lengths = tuple(memory.length for memory in self._regions)
        return seal(_Description(self.endpoint.host, self.endpoint.port, self._secret, lengths))

    def connect(self, description: bytes) -> int:
        """See `Transport.connect`."""
        described = unseal(description, _Description, self.name)
        try:
            connecting = _begin_to_connect(described.host, described.port)
        except (OSError, UnicodeError) as error:
            raise UnreachableError(f"{described} cannot be connected to: {error}") from error
        try:
            peer = self._engine.add_peer(
                connecting.detach(), described.secret, list(described.regions), CONNECT_TIMEOUT_S
            )
        except RuntimeError as error:
            raise UnreachableError(f"{self._owner}: {error}") from error
        self._down[peer] = False
        return peer

    def post(self, peer: int, op: Op, local_region: int, remote_region: int, runs: Runs, timeout_s: float) -> int:
        """See `Transport.post`."""
        if self._down.get(peer, True):
            raise PeerLostError(f"peer {peer} is down, fenced or unknown; connect to it again")
        try:
            return self._engine.post(
                peer, op == "write", local_region, remote_region, runs.local, runs.remote, runs.length, timeout_s
            )
        except OutOfBounds as error:
            raise OutOfBoundsError(str(error)) from None
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._engine.fileno()

    def poll(self) -> list[Event]:
        """See `Transport.poll`."""
        events: list[Event] = []
        for kind, peer, batch, text in self._engine.drain():
            if kind == "completed":
                events.append(Completed(batch=batch, error=text or None))
            elif kind == "fenced":
                del self._down[peer]
                events.append(Fenced(peer=peer))
            else:
                self._down[peer] = True
                events.append(PeerDown(peer=peer, cause=text, gone=kind == "lost"))
        return events

    def fence(self, peer: int) -> None:
        """See `Transport.fence`."""
        if peer not in self._down:
            return
        self._down[peer] = True
        self._engine.fence(peer)

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        for peer in list(self._down):
            self.fence(peer)
        self._engine.close()
