"""Where connections come in: taking one, and finding out whether it speaks TLS.

The sockets are taken one by one rather than by `asyncio.start_server`, which hands a connection over only after its TLS
handshake: until then nobody could count it, nor put it under the same deadline as the rest of what a stranger may say.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl

from connector.connection import READ_AHEAD_BYTES, Connection
from connector.errors import HandshakeError, WireError
from connector.handshake import SPEAKS_PLAIN, SPEAKS_TLS, TLS_ADVICE

logger = logging.getLogger(__name__)

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SHORTAGE_S = 1.0
"""How long nobody is let in after descriptors or memory have run out."""

TLS_FIRST = b"\x16"
"""The first byte of a TLS handshake."""
FRAME_FIRST = b"\x00"
"""The first byte of a length below 16 MiB, as every frame's is."""


async def accept(listening: socket.socket) -> socket.socket:
    """The next connection to `listening`. Others get a turn in between, however many there are."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(0)
        try:
            accepted, _ = await loop.sock_accept(listening)
        except OSError as error:
            if error.errno in SHORTAGES:
                logger.error("no connection can be taken for %g s: %s", SHORTAGE_S, error)
                await asyncio.sleep(SHORTAGE_S)
            elif error.errno != errno.ECONNABORTED:  # it has gone before its turn came
                raise
        else:
            return accepted


def name_of(accepted: socket.socket) -> str:
    """What to call a connection before its other end has a name."""
    try:
        host, port = accepted.getpeername()[:2]
    except OSError:  # it has gone
        return "a peer"
    return f"the peer at {host}:{port}"


async def enter(accepted: socket.socket, peer: str, tls: ssl.SSLContext | None) -> Connection:
    """A connection over the socket, once the other end has said something: bound it by a deadline.

    Raises:
        HandshakeError: only one of the two ends speaks TLS.
        WireError: it has gone, or the TLS handshake failed.
    """
    first = await _first_byte(accepted, peer)
    if tls is not None and first == TLS_FIRST:
        return await _connection(accepted, peer, tls)
    connection = await _connection(accepted, peer, None)
    if tls is None and first == TLS_FIRST:
        await connection.say_last(SPEAKS_PLAIN)
        raise HandshakeError(f"{peer} speaks TLS and this end does not; {TLS_ADVICE}")
    if tls is not None:
        if first == FRAME_FIRST:
            await connection.say_last(SPEAKS_TLS)
        connection.abort()
        raise HandshakeError(f"this end speaks TLS and {peer} does not; {TLS_ADVICE}")
    return connection


async def _connection(accepted: socket.socket, peer: str, tls: ssl.SSLContext | None) -> Connection:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_AHEAD_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    try:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=tls)
    except ssl.SSLError as error:
        raise WireError(f"{peer} does not agree on TLS: {error}") from error
    except OSError as error:
        raise WireError(f"the connection to {peer} broke: {error}") from error
    return Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop), peer)


async def _first_byte(accepted: socket.socket, peer: str) -> bytes:
    """What the other end says first, left where it is."""
    while True:
        try:
            first = accepted.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            await _readable(accepted)
        except OSError as error:
            raise WireError(f"the connection to {peer} broke: {error}") from error
        else:
            if not first:
                raise WireError(f"{peer} closed the connection")
            return first


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
