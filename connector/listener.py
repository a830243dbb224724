"""Ports, taken atomically.

A port is taken by binding and listening, and the socket that did so is kept: nothing is probed, closed and bound again,
so no other process can slip in between. There is no SO_REUSEPORT, which would let two listeners share a port unseen.
SO_REUSEADDR (only past connections in TIME_WAIT are ignored) lets two sockets *bind* one port as long as neither
listens, so a port counts as taken only once `listen` has succeeded. The endpoint is published after that, never before.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable

import msgspec

from connector.errors import ListenerError
from connector.ports import Endpoint, ListenOn, PortSearch

BACKLOG = 512


class Listener(msgspec.Struct, frozen=True):
    """A listening socket and the endpoint to publish."""

    socket: socket.socket
    endpoint: Endpoint
    search: PortSearch


class Listeners:
    """Everything that one worker listens on."""

    def __init__(self) -> None:
        self._open: list[Listener] = []
        self._closed = False

    def allocate(self, *wanted: ListenOn) -> tuple[Listener, ...]:
        """Take one listener for each wish, or none at all.

        Raises:
            ListenerError: a port is busy, a range is used up, the address is not this host's or cannot be advertised,
                or this object has been closed. The message names the host and port.
        """
        if self._closed:
            raise ListenerError(f"listeners were closed; nothing can be allocated on {_names(wanted)} any more")
        taken: list[Listener] = []
        with contextlib.ExitStack() as undo:
            for wish in wanted:
                listener = _listen(wish)
                undo.callback(listener.socket.close)
                taken.append(listener)
            undo.pop_all()
        self._open += taken
        return tuple(taken)

    def close(self) -> None:
        """Close every listener. Closing twice is harmless."""
        self._closed = True
        while self._open:
            listener = self._open.pop()
            listener.socket.close()
            listener.search.close()


def _listen(wish: ListenOn) -> Listener:
    family, address = _resolve(wish.host)
    search = PortSearch(wish)
    while True:
        port = search.next_port()
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address, port))
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except OSError as error:
            listening.close()
            search.refused(error)
        else:
            return Listener(listening, search.listening(listening.getsockname()[1]), search)


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ListenerError(
            f"cannot listen on {host!r}: {error}; set connector.host to an address of this host"
        ) from error
    if not host or ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
        raise ListenerError(
            f"cannot listen on {host!r}: peers are told this address and cannot connect to a wildcard; "
            "set connector.host to the address that they reach this host by"
        )
    return family, str(address[0])


def _names(wanted: Iterable[ListenOn]) -> str:
    return ", ".join(f"{wish.host}:{wish.ports[0]}" for wish in wanted) or "nothing"
