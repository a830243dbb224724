"""A scripted consumer or producer at the other end of a control connection."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from connector import (
    Endpoint,
    EngineId,
    Listeners,
    ListenOn,
    PoolGeometry,
    Sources,
)
from connector.acceptor import Acceptor
from connector.connection import Connection
from connector.consumers import Consumers
from connector.dial import Session, dial
from connector.handshake import Identity
from connector.lanes import Lanes
from connector.wire import Record
from tests.connector.fabric import Fabric, FabricTransport
from tests.connector.pool import TOKEN, D, P, Pool, compatibility

ANSWER_S = 10.0
LEASE_S = 30.0
POOL = Pool(4)


def identity(
    engine_id: EngineId,
    token: bytes = TOKEN,
    geometry: PoolGeometry = POOL.geometry,
    lease_s: float = LEASE_S,
    transports: dict[str, bytes] | None = None,
    **changes: object,
) -> Identity:
    record = Record(
        compatibility=compatibility(**changes), geometry=geometry, lease_s=lease_s, transports=transports or {}
    )
    return Identity(engine_id=engine_id, token=token, record=record)


class Producer:
    """An acceptor on a port of its own, whose transport description is one end of a fabric."""

    def __init__(self, us: Identity) -> None:
        self.faults: list[BaseException] = []
        self.sources = Sources(P, POOL.geometry, LEASE_S, asyncio.get_running_loop().time)
        self.acceptor = Acceptor(
            us,
            self.sources,
            Consumers(Lanes({}, ANSWER_S, self.faults.append)),
            answer_s=ANSWER_S,
            idle_s=LEASE_S,
            on_fault=self.faults.append,
        )
        self.endpoint = Endpoint("", 0)

    @property
    def counters(self) -> Counter[str]:
        return self.acceptor.counters


@asynccontextmanager
async def producing(us: Identity | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Producer]:
    fabric_end = FabricTransport(Fabric(), str(P), None)
    listeners = Listeners()
    (listener,) = listeners.allocate(ListenOn("127.0.0.1", range(1)))
    producer = Producer(us or identity(P, transports={"fabric": fabric_end.describe()}))
    await producer.acceptor.start(listener, tls)
    producer.endpoint = listener.endpoint
    try:
        yield producer
    finally:
        await producer.acceptor.close()
        listeners.close()
    assert producer.faults == []


@asynccontextmanager
async def listening(
    serve: Callable[[Connection], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Endpoint]:
    """A scripted producer."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, "a consumer")
        await serve(connection)
        await connection.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])


async def raw(endpoint: Endpoint, data: bytes = b"", tls: ssl.SSLContext | None = None) -> Connection:
    """A connection without a handshake, on which `data` has been sent."""
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
    writer.write(data)
    return Connection(reader, writer, "the producer")


async def dialled(
    endpoint: Endpoint, us: Identity | None = None, producer: EngineId = P, tls: ssl.SSLContext | None = None
) -> Session:
    fabric = Fabric()
    fabric.transport(str(P))
    lanes = Lanes({"fabric": fabric.transport(str(D))}, ANSWER_S, lambda error: None)
    return await dial(us or identity(D), producer, endpoint, lanes, None, timeout_s=ANSWER_S, tls=tls)


async def read_on(connection: Connection) -> None:
    while True:
        await connection.receive(10 * ANSWER_S)


async def greeted(endpoint: Endpoint) -> Connection:
    """A raw connection after an honest handshake."""
    return (await dialled(endpoint)).connection
