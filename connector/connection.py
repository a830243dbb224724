"""One control connection: frames with deadlines over a stream.

Whatever goes wrong with it is a `WireError` and the end of this connection only.
"""

from __future__ import annotations

import asyncio

from connector import wire
from connector.errors import WireError
from connector.wire import MAX_FRAME_BYTES, PREFIX_BYTES, TAG_BYTES, Frame, Seal

LINGER_S = 1.0
"""How long a refused peer gets to read why, and a closing connection to flush."""

READ_AHEAD_BYTES = 1 << 16
"""How much is kept of what a peer has sent and nobody has asked for yet: the limit of the stream's reader."""

UNSENT_BYTES = 1 << 16
"""From here on whoever sends waits until the peer has read."""

MAX_UNREAD_BYTES = 1 << 20
"""How much a peer may leave unread of what is said to it without waiting."""


class Connection:
    """Owner of one stream. `peer` is for messages only."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        self.peer = peer
        self._reader = reader
        self._writer = writer
        self._writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._last_said = False
        self._seals: tuple[Seal, Seal] | None = None

    @property
    def sealed(self) -> bool:
        """Whether both ends have proved themselves, and every frame since."""
        return self._seals is not None

    def seal(self, send_key: bytes, receive_key: bytes) -> None:
        """From now on every frame carries a tag, and one that comes without the right one ends the connection."""
        self._seals = Seal(send_key), Seal(receive_key)

    def _encoded(self, frame: Frame) -> bytes:
        data = wire.encode(frame)
        return data if self._seals is None else wire.sealed(data, self._seals[0])

    async def send(self, frame: Frame, timeout_s: float) -> None:
        """Hand a frame to the peer's socket; waits only while the peer does not read.

        Raises:
            WireError: the connection is gone, or the peer has not read for `timeout_s`.
        """
        data = self._encoded(frame)
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(data)
                await self._writer.drain()
        except TimeoutError:
            raise WireError(f"{self.peer} has not read for {timeout_s:g} s") from None
        except OSError as error:
            raise WireError(f"the connection to {self.peer} broke: {error}") from error

    def say(self, frame: Frame) -> None:
        """Hand a frame over without waiting. A connection whose peer does not read is dropped instead: what has to be
        heard is said again on the next one."""
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.abort()
        elif not self._writer.is_closing():
            self._writer.write(self._encoded(frame))

    async def receive(self, timeout_s: float, limit: int = MAX_FRAME_BYTES) -> Frame:
        """The next frame, whole, within `timeout_s`. `limit` is for its body, without the tag.

        Raises:
            WireError: it was late, larger than `limit` bytes, malformed, or the connection ended.
        """
        if self._seals is not None:
            limit += TAG_BYTES
        try:
            async with asyncio.timeout(timeout_s):
                prefix = await self._reader.readexactly(PREFIX_BYTES)
                body = await self._reader.readexactly(wire.body_length(prefix, limit))
        except TimeoutError:
            raise WireError(f"no whole frame came from {self.peer} within {timeout_s:g} s") from None
        except asyncio.IncompleteReadError as error:
            where = "in the middle of a frame" if error.partial else "the connection"
            raise WireError(f"{self.peer} closed {where}") from error
        except OSError as error:
            raise WireError(f"the connection to {self.peer} broke: {error}") from error
        return wire.decode(body if self._seals is None else wire.unsealed(body, self._seals[1]))

    async def say_last(self, frame: Frame) -> None:
        """Send a last frame so that it arrives, then close.

        Closing with unread input makes the kernel reset the connection, and the reset may overtake the frame: so the
        sending half is closed first, and what still comes in is read away for a moment. Only the first last word
        counts.
        """
        if self._last_said:
            return
        self._last_said = True
        try:
            async with asyncio.timeout(LINGER_S):
                self._writer.write(self._encoded(frame))
                if self._writer.can_write_eof():  # TLS has no such thing
                    self._writer.write_eof()
                while await self._reader.read(1 << 16):
                    pass
        except (TimeoutError, OSError):
            pass  # the peer does not listen; there is nobody left to tell
        await self.close()

    def abort(self) -> None:
        """Drop the connection now; whoever waits on it gets a `WireError`."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close; a peer that does not read cannot hold it up. Closing twice is harmless."""
        self._writer.close()
        try:
            async with asyncio.timeout(LINGER_S):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()
