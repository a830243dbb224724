"""The producer's end of the control connections.

Each connection has a task of its own, and every wait in it a deadline: a peer that hangs or talks nonsense loses its
own connection and holds nobody else up. Sources outlive connections: a consumer may come back and go on renewing.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable

from connector.connection import Connection
from connector.consumers import Consumers
from connector.errors import HandshakeError, WireError
from connector.handshake import Identity, answer
from connector.identity import EngineId
from connector.listener import Listener
from connector.sources import Sources
from connector.wire import (
    Ack,
    AckReply,
    Bye,
    Cancel,
    Frame,
    Record,
    Refused,
    Renew,
    RenewReply,
)

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""Connections at a time that have not proved the token; the oldest goes when another one comes."""


class Acceptor:
    """Answers every consumer that connects to `listener`.

    `answer_s` bounds each step of a handshake and each reply, `idle_s` the silence of a consumer between two frames: it
    renews more often than that, even when it holds nothing. `on_fault` is told of a mistake of this worker.
    """

    def __init__(
        self,
        us: Identity,
        sources: Sources,
        consumers: Consumers,
        *,
        answer_s: float,
        idle_s: float,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._us = us
        self._sources = sources
        self._consumers = consumers
        self._answer_s = answer_s
        self._idle_s = idle_s
        self._on_fault = on_fault
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], Connection] = {}
        self._strangers: dict[asyncio.Task[None], Connection] = {}

    async def start(self, listener: Listener, tls: ssl.SSLContext | None) -> None:
        """Begin to accept; the listener stays its owner's to close."""
        limit_s = None if tls is None else self._answer_s
        self._server = await asyncio.start_server(
            self._accept, sock=listener.socket, ssl=tls, ssl_handshake_timeout=limit_s
        )

    async def close(self) -> None:
        """Stop accepting, say goodbye to every consumer, and wait for every task. Closing twice is harmless."""
        if self._server is not None:
            self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= MAX_STRANGERS:  # whoever knows the token has long proved it
            self._strangers.pop(next(iter(self._strangers))).abort()
            self.counters["strangers_turned_away"] += 1
        address = writer.get_extra_info("peername")
        connection = Connection(reader, writer, f"the peer at {address[0]}:{address[1]}" if address else "a peer")
        task = asyncio.get_running_loop().create_task(self._serve(connection), name=f"control of {connection.peer}")
        self._serving[task] = self._strangers[task] = connection
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        del self._serving[task]
        self._strangers.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(error)

    async def _serve(self, connection: Connection) -> None:
        try:
            consumer, record = await self._proved(connection)
            self.counters["handshakes_accepted"] += 1
            connection.peer = str(consumer)
            logger.info("%s has connected", consumer)
            self._consumers.arrived(consumer, record, connection)
            try:
                await self._converse(connection, consumer)
            finally:
                self._consumers.left(consumer, connection)
            logger.info("%s has left", consumer)
        except HandshakeError as error:
            self.counters["handshakes_refused"] += 1
            logger.warning("handshake with %s failed: %s", connection.peer, error)
        except WireError as error:
            self.counters["connections_broken"] += 1
            logger.warning("control connection lost: %s", error)
            if connection.sealed:  # a stranger is told nothing
                await connection.say_last(Refused(reason="malformed", detail=str(error)))
        except asyncio.CancelledError:
            await connection.say_last(Bye(reason="closing"))
            raise
        finally:
            await connection.close()

    async def _proved(self, connection: Connection) -> tuple[EngineId, Record]:
        """Who it is, within one deadline for all that a stranger may say."""
        try:
            async with asyncio.timeout(self._answer_s):
                found = await answer(connection, self._us, self._answer_s)
        except TimeoutError:
            raise WireError(f"{connection.peer} has not proved itself within {self._answer_s:g} s") from None
        task = asyncio.current_task()
        assert task is not None
        self._strangers.pop(task, None)
        return found

    async def _converse(self, connection: Connection, consumer: EngineId) -> None:
        for notice in self._sources.notices(consumer):
            await connection.send(notice, self._answer_s)
        while (frame := await connection.receive(self._idle_s)) and not isinstance(frame, Bye):
            await self._reply(connection, consumer, frame)

    async def _reply(self, connection: Connection, consumer: EngineId, frame: Frame) -> None:
        match frame:
            case Renew() | Ack() | Cancel():
                if (frame.consumer, frame.producer) != (consumer, self._us.engine_id):
                    self.counters["frames_misaddressed"] += 1
                    detail = f"a {type(frame).__name__} from {frame.consumer} to {frame.producer} came over the"
                    detail += f" connection between {consumer} and {self._us.engine_id}"
                    await connection.say_last(Refused(reason="misaddressed", detail=detail))
                    raise HandshakeError(detail)
                if isinstance(frame, Cancel):
                    self._sources.cancel(frame.transfer_id, consumer)  # answered when nothing is in flight any more
                    return
                reply = self._renew(frame) if isinstance(frame, Renew) else self._ack(frame)
                await connection.send(reply, self._answer_s)
            case Refused():
                raise HandshakeError(f"{consumer} refused ({frame.reason}): {frame.detail}")
            case _:
                raise WireError(f"{consumer} sent a {type(frame).__name__}, which is not a consumer's to send now")

    def _renew(self, frame: Renew) -> RenewReply:
        statuses = [(id_, self._sources.renew(id_, frame.consumer)) for id_ in frame.transfer_ids]
        return RenewReply(
            consumer=frame.consumer,
            producer=frame.producer,
            sequence=frame.sequence,
            renewed=[id_ for id_, status in statuses if status == "renewed"],
            ended=[id_ for id_, status in statuses if status == "ended"],
        )

    def _ack(self, frame: Ack) -> AckReply:
        status = self._sources.ack(frame.transfer_id, frame.consumer, frame.rank, frame.world_size, frame.outcome)
        return AckReply(consumer=frame.consumer, producer=frame.producer, transfer_id=frame.transfer_id, status=status)
