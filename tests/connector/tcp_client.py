"""The tcp transport's wire, spoken by hand: what connector/native/tcp_wire.hpp says, byte for byte."""

from __future__ import annotations

import socket
import struct

import msgspec

from connector.transport.sealed import seal, unseal
from connector.transport.tcp import TcpTransport, _Description
from tests.connector.near import PATIENCE_S

HELLO_MAGIC = int.from_bytes(b"KVFTCP1", "little")
REQUEST_MAGIC = int.from_bytes(b"KVFreq", "little")
REPLY_MAGIC = int.from_bytes(b"KVFrep", "little")
READ, WRITE = 1, 2
DONE, REFUSED = 0, 1
REPLY_BYTES = 32


def opened(description: bytes) -> _Description:
    """A description, to be looked into."""
    return unseal(description, _Description, "tcp")


def changed(description: bytes, **changes: object) -> bytes:
    """A description with other fields, sealed again."""
    return seal(msgspec.structs.replace(opened(description), **changes))


def hello(secret: bytes) -> bytes:
    """What an initiator says first."""
    return struct.pack("<Q", HELLO_MAGIC) + secret


def request(
    asked: int, *pieces: tuple[int, int], region: int = 0, total: int | None = None, count: int | None = None
) -> bytes:
    """A request for (offset, length) pieces; `total` and `count` are the true ones unless told otherwise."""
    told = sum(length for _, length in pieces) if total is None else total
    head = struct.pack("<QQqqqq", REQUEST_MAGIC, asked, 7, region, len(pieces) if count is None else count, told)
    return head + b"".join(struct.pack("<qq", *piece) for piece in pieces)


def reply(status: int, batch: int, length: int, magic: int = REPLY_MAGIC) -> bytes:
    """What a target answers."""
    return struct.pack("<QQqq", magic, status, batch, length)


class Client:
    """A data connection to a transport of this process, past its hello unless `secret` is None."""

    def __init__(self, transport: TcpTransport, secret: bytes | None = b"") -> None:
        described = opened(transport.describe())
        self.socket = socket.create_connection((described.host, described.port), timeout=PATIENCE_S)
        if secret is not None:
            self.socket.sendall(hello(secret or described.secret))

    def send(self, data: bytes) -> None:
        """All of it."""
        self.socket.sendall(data)

    def receive(self, length: int) -> bytes:
        """Exactly so many bytes, or fewer when the connection ends."""
        data = b""
        while len(data) < length:
            try:
                more = self.socket.recv(length - len(data))
            except ConnectionResetError:
                break
            if not more:
                break
            data += more
        return data

    def is_closed(self) -> bool:
        """Waits for the other end to close it; there is nothing left to be received."""
        return self.receive(1) == b""

    def close(self) -> None:
        """The connection."""
        self.socket.close()
