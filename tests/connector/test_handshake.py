"""Both ends of the handshake, against honest, foreign, lying and silent peers."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from connector import (
    Endpoint,
    EngineId,
    HandshakeError,
    IncompatibleError,
    Listeners,
    ListenOn,
    PoolGeometry,
    Sources,
    UnreachableError,
    WireError,
    WrongIncarnationError,
    wire,
)
from connector.acceptor import Acceptor
from connector.connection import Connection
from connector.dial import Session, dial
from connector.handshake import Identity
from connector.wire import Ack, AckReply, Bye, Challenge, Frame, Hello, Proof, Record, Refused, Renew, RenewReply
from tests.clock import in_virtual_time, until
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
        self.acceptor = Acceptor(us, self.sources, answer_s=ANSWER_S, idle_s=LEASE_S, on_fault=self.faults.append)
        self.endpoint = Endpoint("", 0)

    @property
    def counters(self) -> Counter[str]:
        return self.acceptor.counters


@asynccontextmanager
async def producing(us: Identity | None = None) -> AsyncIterator[Producer]:
    fabric_end = FabricTransport(Fabric(), str(P), None)
    listeners = Listeners()
    (listener,) = listeners.allocate(ListenOn("127.0.0.1", range(1)))
    producer = Producer(us or identity(P, transports={"fabric": fabric_end.describe()}))
    await producer.acceptor.start(listener)
    producer.endpoint = listener.endpoint
    try:
        yield producer
    finally:
        await producer.acceptor.close()
        listeners.close()
    assert producer.faults == []


@asynccontextmanager
async def listening(serve: Callable[[Connection], Awaitable[None]]) -> AsyncIterator[Endpoint]:
    """A scripted producer."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, "a consumer")
        await serve(connection)
        await connection.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])


async def raw(endpoint: Endpoint, data: bytes = b"") -> Connection:
    """A connection without a handshake, on which `data` has been sent."""
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(data)
    return Connection(reader, writer, "the producer")


async def dialled(endpoint: Endpoint, us: Identity | None = None, producer: EngineId = P) -> Session:
    fabric = Fabric()
    fabric.transport(str(P))
    return await dial(
        us or identity(D), producer, endpoint, {"fabric": fabric.transport(str(D))}, None, timeout_s=ANSWER_S
    )


async def read_on(connection: Connection) -> None:
    while True:
        await connection.receive(10 * ANSWER_S)


async def greeted(endpoint: Endpoint) -> Connection:
    """A raw connection after an honest handshake."""
    return (await dialled(endpoint)).connection


@in_virtual_time
async def test_honest_ends_exchange_their_records() -> None:
    async with producing() as producer:
        session = await dialled(producer.endpoint)
        assert session.record.geometry == POOL.geometry
        assert session.record.lease_s == LEASE_S
        assert session.data_peer == ("fabric", 0)
        assert producer.counters["handshakes_accepted"] == 1
        await session.connection.say_last(Bye(reason="done"))


# Refusals reach the other side with their reason


@in_virtual_time
async def test_a_consumer_without_the_token_is_refused() -> None:
    async with producing() as producer:
        with pytest.raises(HandshakeError, match=r"refused \(unauthorized\): decode-0@.* does not know"):
            await dialled(producer.endpoint, identity(D, token=b"another"))
        await until(lambda: producer.counters["handshakes_refused"] == 1)


@in_virtual_time
async def test_a_producer_without_the_token_is_refused() -> None:
    heard: list[Frame] = []

    async def serve(connection: Connection) -> None:
        await connection.receive(ANSWER_S)
        await connection.send(Challenge(nonce=b"m" * 32), ANSWER_S)
        await connection.receive(ANSWER_S)
        await connection.send(Proof(mac=b"x" * 32), ANSWER_S)
        heard.append(await connection.receive(ANSWER_S))

    async with listening(serve) as endpoint:
        with pytest.raises(HandshakeError, match=r"prefill-0@.* does not know the cluster token"):
            await dialled(endpoint)
        (refused,) = heard
        assert isinstance(refused, Refused)
        assert refused.reason == "unauthorized"


@in_virtual_time
async def test_another_incarnation_is_refused() -> None:
    async with producing() as producer:
        with pytest.raises(WrongIncarnationError, match=r"is gone: .*000000000000000b"):
            await dialled(producer.endpoint, producer=EngineId(P.name, 99))


@in_virtual_time
async def test_differing_records_are_refused_by_name_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async with producing() as producer:
        with pytest.raises(IncompatibleError) as refused:
            await dialled(producer.endpoint, identity(D, dtype="float32", block_size=16))
        assert refused.value.differences == {"dtype": ("float32", "bfloat16"), "block_size": (16, 4)}
        await until(lambda: producer.counters["handshakes_refused"] == 1)
    assert "dtype: ours 'bfloat16', theirs 'float32'" in caplog.text


@in_virtual_time
async def test_a_consumer_checks_the_record_too() -> None:
    """A producer that does not compare is no reason to read pages that mean something else."""

    async def serve(connection: Connection) -> None:
        await answer_honestly(connection, identity(P, model_fingerprint="other/1").record)

    async with listening(serve) as endpoint:
        with pytest.raises(IncompatibleError, match=r"model_fingerprint: ours 'tiny-llama/1', theirs 'other/1'"):
            await dialled(endpoint)


@in_virtual_time
async def test_a_geometry_that_leaves_its_region_is_refused() -> None:
    short = msgspec.structs.replace(POOL.geometry, region_bytes=(100,))

    async def serve(connection: Connection) -> None:
        await answer_honestly(connection, identity(P, geometry=short).record)

    async with listening(serve) as endpoint:
        with pytest.raises(HandshakeError, match=r"refused \(geometry\): .* of 100"):
            await dialled(endpoint)


@in_virtual_time
async def test_another_protocol_version_is_refused() -> None:
    async with producing() as producer:
        connection = await raw(producer.endpoint)
        await connection.send(Hello(version=99, consumer=D, producer=P, nonce=b"n" * 32), ANSWER_S)
        refused = await connection.receive(ANSWER_S)
        assert isinstance(refused, Refused)
        assert refused.reason == "protocol_version"
        assert "version 1 of the protocol" in refused.detail
        assert "version 99" in refused.detail
        await connection.close()


@in_virtual_time
async def test_no_common_transport_is_told_to_both(caplog: pytest.LogCaptureFixture) -> None:
    async with producing(identity(P, transports={"carrier pigeon": b""})) as producer:
        with pytest.raises(UnreachableError, match=r"no transport reaches prefill-0@.*offers only carrier pigeon"):
            await dialled(producer.endpoint)
        await until(lambda: producer.counters["handshakes_refused"] == 1)
    assert "refused (unreachable)" in caplog.text


async def answer_honestly(connection: Connection, record: Record, token: bytes = TOKEN) -> None:
    """The producer's part by the book, written a second time so that a change of the book is noticed."""
    hello = await connection.receive(ANSWER_S)
    assert isinstance(hello, Hello)
    challenge = Challenge(nonce=b"m" * 32)
    await connection.send(challenge, ANSWER_S)
    proof = await connection.receive(ANSWER_S)
    assert proof == Proof(mac=mac(token, "consumer", hello, challenge))
    await connection.send(Proof(mac=mac(token, "producer", hello, challenge)), ANSWER_S)
    await connection.receive(ANSWER_S)
    await connection.send(record, ANSWER_S)
    await connection.receive(ANSWER_S)


def mac(token: bytes, role: str, hello: Hello, challenge: Challenge) -> bytes:
    fields = (role, 1, hello.consumer, hello.producer, hello.nonce, challenge.nonce)
    return hmac.new(token, msgspec.msgpack.encode(fields), "sha256").digest()


# Proofs cannot be borrowed


@in_virtual_time
async def test_a_replayed_proof_is_refused() -> None:
    hello = Hello(version=1, consumer=D, producer=P, nonce=b"n" * 32)
    async with producing() as producer:
        first = await raw(producer.endpoint)
        await first.send(hello, ANSWER_S)
        challenge = await first.receive(ANSWER_S)
        assert isinstance(challenge, Challenge)
        proof = Proof(mac=mac(TOKEN, "consumer", hello, challenge))
        await first.send(proof, ANSWER_S)
        assert isinstance(await first.receive(ANSWER_S), Proof)
        second = await raw(producer.endpoint)
        await second.send(hello, ANSWER_S)
        await second.receive(ANSWER_S)
        await second.send(proof, ANSWER_S)
        refused = await second.receive(ANSWER_S)
        assert isinstance(refused, Refused)
        assert refused.reason == "unauthorized"
        for connection in (first, second):
            await connection.close()


@in_virtual_time
async def test_a_stranger_learns_no_proof_from_a_listener() -> None:
    async with producing() as producer:
        connection = await raw(producer.endpoint)
        await connection.send(Hello(version=1, consumer=D, producer=P, nonce=b"n" * 32), ANSWER_S)
        assert isinstance(await connection.receive(ANSWER_S), Challenge)
        await connection.send(Proof(mac=b""), ANSWER_S)
        assert isinstance(await connection.receive(ANSWER_S), Refused)
        await connection.close()


@in_virtual_time
async def test_a_short_nonce_is_refused() -> None:
    async with producing() as producer:
        connection = await raw(producer.endpoint)
        await connection.send(Hello(version=1, consumer=D, producer=P, nonce=b""), ANSWER_S)
        refused = await connection.receive(ANSWER_S)
        assert isinstance(refused, Refused)
        assert "nonce of 0 bytes" in refused.detail
        await connection.close()


# Peers that talk nonsense or nothing lose their own connection only


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "over the limit of 4096"),
        ((5000).to_bytes(4, "big") + b"x" * 5000, "a frame of 5000 bytes is over the limit of 4096"),
        ((3).to_bytes(4, "big") + b"\xc1\xc1\xc1", "malformed"),
        (wire.encode(Bye(reason="first words")), "sent a Bye where a Hello was due"),
        ((100).to_bytes(4, "big") + b"half", "no whole frame came"),
        (b"", "no whole frame came"),
    ],
)
@in_virtual_time
async def test_a_bad_first_frame_closes_that_connection_only(data: bytes, reason: str) -> None:
    async with producing() as producer:
        good = await greeted(producer.endpoint)
        bad = await raw(producer.endpoint, data)
        refused = await bad.receive(2 * ANSWER_S)
        assert isinstance(refused, Refused)
        assert reason in refused.detail
        with pytest.raises(WireError, match="closed the connection"):
            await bad.receive(ANSWER_S)
        await good.send(Renew(consumer=D, producer=P, sequence=1, transfer_ids=["t"]), ANSWER_S)
        assert await good.receive(ANSWER_S) == RenewReply(consumer=D, producer=P, sequence=1, renewed=[], ended=[])
        for connection in (good, bad):
            await connection.close()


@in_virtual_time
async def test_silent_peers_block_nobody() -> None:
    async with producing() as producer:
        silent = [await raw(producer.endpoint) for _ in range(20)]
        before = asyncio.get_running_loop().time()
        good = await greeted(producer.endpoint)
        assert asyncio.get_running_loop().time() - before < ANSWER_S
        await until(lambda: producer.counters["connections_broken"] == 20)
        for connection in [good, *silent]:
            await connection.close()


@in_virtual_time
async def test_a_producer_that_says_nothing_is_given_up() -> None:
    async def serve(connection: Connection) -> None:
        await connection.receive(ANSWER_S)
        with pytest.raises(WireError, match="closed the connection"):
            await read_on(connection)

    async with listening(serve) as endpoint:
        with pytest.raises(HandshakeError, match=r"broke off: no whole frame came from prefill-0@.* within 10 s"):
            await dialled(endpoint)


@in_virtual_time
async def test_nothing_listens_there() -> None:
    listeners = Listeners()
    (listener,) = listeners.allocate(ListenOn("127.0.0.1", range(1)))
    listeners.close()
    with pytest.raises(HandshakeError, match=rf"cannot be reached at {listener.endpoint}: .*refused"):
        await dialled(listener.endpoint)


# After the handshake


@in_virtual_time
async def test_renewals_and_acks_are_answered() -> None:
    async with producing() as producer:
        connection = await greeted(producer.endpoint)
        ends: list[str] = []
        producer.sources.open("t", D, lambda end: ends.append(end.outcome))
        producer.sources.hold("t", {"full": [0]}, 3)
        await connection.send(Renew(consumer=D, producer=P, sequence=1, transfer_ids=["t", "u"]), ANSWER_S)
        assert await connection.receive(ANSWER_S) == RenewReply(
            consumer=D, producer=P, sequence=1, renewed=["t"], ended=[]
        )
        ack = Ack(consumer=D, producer=P, transfer_id="t", rank=0, world_size=1, outcome="published")
        for status in ("accepted", "duplicate"):
            await connection.send(ack, ANSWER_S)
            reply = await connection.receive(ANSWER_S)
            assert isinstance(reply, AckReply)
            assert reply.status == status
        assert ends == ["released"]
        await connection.send(Renew(consumer=D, producer=P, sequence=2, transfer_ids=["t"]), ANSWER_S)
        reply = await connection.receive(ANSWER_S)
        assert isinstance(reply, RenewReply)
        assert reply.ended == ["t"]
        await connection.say_last(Bye(reason="done"))


@pytest.mark.parametrize("changes", [{"consumer": EngineId(D.name, 99)}, {"producer": EngineId(P.name, 99)}])
@in_virtual_time
async def test_a_frame_of_another_incarnation_is_refused_and_counted(changes: dict[str, EngineId]) -> None:
    ack = Ack(consumer=D, producer=P, transfer_id="t", rank=0, world_size=1, outcome="published")
    async with producing() as producer:
        producer.sources.open("t", D, lambda end: None)
        connection = await greeted(producer.endpoint)
        await connection.send(msgspec.structs.replace(ack, **changes), ANSWER_S)
        refused = await connection.receive(ANSWER_S)
        assert isinstance(refused, Refused)
        assert refused.reason == "misaddressed"
        assert producer.counters["frames_misaddressed"] == 1
        assert producer.sources.active == 1
        await connection.close()


@in_virtual_time
async def test_a_frame_that_is_not_a_consumers_closes_the_connection() -> None:
    async with producing() as producer:
        connection = await greeted(producer.endpoint)
        await connection.send(Proof(mac=b"again"), ANSWER_S)
        refused = await connection.receive(ANSWER_S)
        assert isinstance(refused, Refused)
        assert "sent a Proof, which is not a consumer's to send now" in refused.detail
        await connection.close()


@in_virtual_time
async def test_a_consumer_that_has_gone_silent_loses_its_connection() -> None:
    async with producing() as producer:
        connection = await greeted(producer.endpoint)
        refused = await connection.receive(2 * LEASE_S)
        assert isinstance(refused, Refused)
        assert "within 30 s" in refused.detail
        assert producer.counters["connections_broken"] == 1
        await connection.close()


@in_virtual_time
async def test_a_consumer_that_never_reads_loses_its_connection() -> None:
    ids = [f"{number:064}" for number in range(4000)]
    async with producing() as producer:
        for transfer_id in ids:
            producer.sources.open(transfer_id, D, lambda end: None)
        connection = await greeted(producer.endpoint)
        renewal = Renew(consumer=D, producer=P, sequence=1, transfer_ids=ids)
        while producer.counters["connections_broken"] == 0:
            await connection.send(renewal, 3 * ANSWER_S)
        await connection.close()
