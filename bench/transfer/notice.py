"""Telling the target that bytes have landed, as the product does it: a small frame on one TCP connection.

The initiator connects; Nagle's delay is off; both ends block with a deadline.
"""

from __future__ import annotations

import socket
import time

import msgspec

from bench.errors import BenchError
from bench.transfer.contender import DEADLINE_S
from connector.wire import PREFIX_BYTES

HOST = "127.0.0.1"


class Landed(msgspec.Struct, frozen=True, tag=True):
    """The bytes of operation `number` are in the target's memory."""

    number: int


class NoticeLine:
    """One end of the connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self._listener.settimeout(DEADLINE_S)
        self._stream: socket.socket | None = None

    @property
    def port(self) -> int:
        """Where this end can be reached until the connection is there."""
        return int(self._listener.getsockname()[1])

    def dial(self, port: int) -> None:
        """Be the initiator."""
        self._use(socket.create_connection((HOST, port), timeout=DEADLINE_S))

    def accept(self) -> None:
        """Be the target."""
        stream, _ = self._listener.accept()
        self._use(stream)

    def send(self, number: int) -> None:
        """Tell the target."""
        assert self._stream is not None
        body = msgspec.msgpack.encode(Landed(number))
        self._stream.sendall(len(body).to_bytes(PREFIX_BYTES, "big") + body)

    def receive(self) -> int:
        """The number of the next notice.

        Raises:
            BenchError: the initiator has gone.
            TimeoutError: none came.
        """
        length = int.from_bytes(self._exactly(PREFIX_BYTES), "big")
        return msgspec.msgpack.decode(self._exactly(length), type=Landed).number

    def await_number(self, number: int) -> int:
        """Wait for that notice; when this process's Python code saw it, in ns of CLOCK_MONOTONIC.

        Raises:
            BenchError: another one came.
        """
        seen = self.receive()
        seen_ns = time.monotonic_ns()
        if seen != number:
            raise BenchError(f"the notice of operation {seen} came where that of {number} was expected")
        return seen_ns

    def _use(self, stream: socket.socket) -> None:
        self._listener.close()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(DEADLINE_S)
        self._stream = stream

    def _exactly(self, length: int) -> bytes:
        assert self._stream is not None
        data = b""
        while len(data) < length:
            more = self._stream.recv(length - len(data))
            if not more:
                raise BenchError("the initiator has closed the connection that notices come on")
            data += more
        return data
