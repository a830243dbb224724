"""The producer's end of the control connections.

Each connection has a task of its own, and every wait in it a deadline: a peer that hangs or talks nonsense loses its
own connection and holds nobody else up. Sources outlive connections: a consumer may come back and go on renewing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from connector.connection import Connection
from connector.consumers import Consumers
from connector.entrance import accept, enter, name_of
from connector.errors import HandshakeError, WireError
from connector.handshake import Identity, answer
from connector.identity import EngineId
from connector.listener import Listener
from connector.records import answer_record
from connector.sources import Sources
from connector.strangers import Strangers
from connector.wire import (
    Ack,
    AckReply,
    Bye,
    Cancel,
    Frame,
    Hello,
    Refused,
    Renew,
    RenewReply,
)

logger = logging.getLogger(__name__)


class Acceptor:
    """Answers every consumer that connects to `listener`.

    `answer_s` bounds all that a stranger may say, TLS included, and each later answer; `idle_s` the silence of a
    consumer between two frames: it renews more often than that, even when it holds nothing. `on_fault` is told of a
    mistake of this worker.
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
        self._strangers = Strangers(self.counters)
        self._accepting: asyncio.Task[None] | None = None
        self._serving: dict[asyncio.Task[None], socket.socket] = {}

    async def start(self, listener: Listener, tls: ssl.SSLContext | None) -> None:
        """Begin to accept; the listener stays its owner's to close."""
        name = f"listening on {listener.endpoint}"
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener.socket, tls), name=name)
        self._accepting.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop accepting, say goodbye to every consumer, and wait for every task. Closing twice is harmless."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        while True:
            accepted = await accept(listening)
            peer = name_of(accepted)
            task = asyncio.get_running_loop().create_task(self._serve(accepted, peer, tls), name=f"control of {peer}")
            self._serving[task] = accepted
            self._strangers.came(task)
            task.add_done_callback(self._served)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(error)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task).close()  # it may have ended before anything else owned it
        self._strangers.left(task)
        self._ended(task)

    async def _serve(self, accepted: socket.socket, peer: str, tls: ssl.SSLContext | None) -> None:
        try:
            connection, hello = await self._let_in(accepted, peer, tls)
        except HandshakeError as error:
            self.counters["handshakes_refused"] += 1
            self._strangers.complain(f"{peer}: {error}")
            return
        except WireError as error:
            self.counters["connections_broken"] += 1
            self._strangers.complain(str(error))
            return
        task = asyncio.current_task()
        assert task is not None
        self._strangers.left(task)
        await self._attend(connection, hello)

    async def _let_in(self, accepted: socket.socket, peer: str, tls: ssl.SSLContext | None) -> tuple[Connection, Hello]:
        """Whoever proves itself, within one deadline. Everybody else is told nothing, or a constant."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._answer_s):
                connection = await enter(accepted, peer, tls)
                return connection, await answer(connection, self._us, self._answer_s)
        except BaseException as error:
            if connection is not None:
                connection.abort()
            if isinstance(error, TimeoutError):
                raise WireError(f"{peer} has not proved itself within {self._answer_s:g} s") from None
            raise

    async def _attend(self, connection: Connection, hello: Hello) -> None:
        consumer = hello.consumer
        connection.peer = str(consumer)
        try:
            record = await answer_record(connection, self._us, hello, self._answer_s)
            self.counters["handshakes_accepted"] += 1
            logger.info("%s has connected", consumer)
            self._consumers.arrived(consumer, record, connection)
            try:
                await self._converse(connection, consumer)
            finally:
                self._consumers.left(consumer, connection)
            logger.info("%s has left", consumer)
        except HandshakeError as error:
            self.counters["handshakes_refused"] += 1
            logger.warning("handshake with %s failed: %s", consumer, error)
        except WireError as error:
            self.counters["connections_broken"] += 1
            logger.warning("control connection lost: %s", error)
            await connection.say_last(Refused(reason="malformed", detail=str(error)))
        except asyncio.CancelledError:
            await connection.say_last(Bye(reason="closing"))
            raise
        finally:
            await connection.close()

    async def _converse(self, connection: Connection, consumer: EngineId) -> None:
        for notice in self._sources.notices(consumer):
            await connection.send(notice, self._answer_s)
        while (frame := await connection.receive(self._idle_s)) and not isinstance(frame, Bye):
            await self._reply(connection, consumer, frame)
            await asyncio.sleep(0)  # frames that are here already are read without waiting: everybody gets a turn

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
