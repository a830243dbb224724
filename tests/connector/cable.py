"""A TCP connection that a test can cut, stall and mend: it stands between a consumer and a producer's listener."""

from __future__ import annotations

import asyncio

from connector import Endpoint


class Cable:
    """Relays to `target`. Cut, it drops its connections and every new one; stalled, it takes bytes and keeps them."""

    def __init__(self, target: Endpoint) -> None:
        self.endpoint = target
        self.attempts: list[float] = []
        self._target = target
        self._server: asyncio.Server | None = None
        self._relaying: set[asyncio.Task[None]] = set()
        self._cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def start(self) -> None:
        """Listen; connect to `endpoint` from now on."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = Endpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Cut for good."""
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Drop everything."""
        self._cut = True
        for task in list(self._relaying):
            task.cancel()
        await asyncio.gather(*self._relaying, return_exceptions=True)

    def stall(self) -> None:
        """Nothing is dropped, and nothing comes through."""
        self._flowing.clear()

    def mend(self) -> None:
        """As new."""
        self._cut = False
        self._flowing.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempts.append(asyncio.get_running_loop().time())
        task = asyncio.create_task(self._relay(reader, writer))
        self._relaying.add(task)
        task.add_done_callback(self._relaying.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            if self._cut:
                return
            far_reader, far = await asyncio.open_connection(self._target.host, self._target.port)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._copy(reader, far))
                both.create_task(self._copy(far_reader, writer))
        except* OSError:
            pass  # one end has gone: the other end learns it now
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.write_eof()
