"""Control connections: peers that talk nonsense or nothing lose their own, and nobody else's."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from connector import (
    EngineId,
    HandshakeError,
    Listeners,
    ListenOn,
    WireError,
    wire,
)
from connector.connection import Connection
from connector.wire import Ack, AckReply, Bye, Proof, Refused, Renew, RenewReply
from tests.clock import in_virtual_time, until
from tests.connector.pool import D, P
from tests.connector.strangers import (
    ANSWER_S,
    LEASE_S,
    dialled,
    greeted,
    identity,
    listening,
    producing,
    raw,
    read_on,
)

OTHER = EngineId("decode-1", 7)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "over the limit of 4096"),
        ((5000).to_bytes(4, "big") + b"x" * 5000, "a frame of 5000 bytes is over the limit of 4096"),
        ((3).to_bytes(4, "big") + b"\xc1\xc1\xc1", "malformed"),
        (wire.encode(Bye(reason="first words")), "sent a Bye where a Hello was due"),
        ((100).to_bytes(4, "big") + b"half", "has not proved itself within 10 s"),
        (b"", "has not proved itself within 10 s"),
    ],
)
@in_virtual_time
async def test_a_bad_first_frame_closes_that_connection_only(
    data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with producing() as producer:
        good = await greeted(producer.endpoint)
        bad = await raw(producer.endpoint, data)
        with pytest.raises(WireError, match=r"closed the connection|broke"):
            await bad.receive(2 * ANSWER_S)  # a stranger is told nothing
        await until(lambda: reason in caplog.text)
        await good.send(Renew(consumer=D, producer=P, sequence=1, transfer_ids=["t"]), ANSWER_S)
        assert await good.receive(ANSWER_S) == RenewReply(consumer=D, producer=P, sequence=1, renewed=[], ended=[])
        for connection in (good, bad):
            await connection.close()


@in_virtual_time
async def test_a_consumer_has_one_connection_the_newest() -> None:
    async with producing() as producer:
        first = await greeted(producer.endpoint)
        second = await greeted(producer.endpoint)
        with pytest.raises(WireError, match=r"closed the connection|broke"):
            await first.receive(ANSWER_S)
        await second.send(Renew(consumer=D, producer=P, sequence=1, transfer_ids=[]), ANSWER_S)
        assert isinstance(await second.receive(ANSWER_S), RenewReply)
        for connection in (first, second):
            await connection.close()


@in_virtual_time
async def test_a_meddled_frame_ends_the_connection_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with producing() as producer:
        ends: list[str] = []
        producer.sources.open("t", D, lambda end: ends.append(end.outcome))
        connection = await greeted(producer.endpoint)
        ack = Ack(consumer=D, producer=P, transfer_id="t", rank=0, world_size=1, outcome="published")
        connection._writer.write(wire.encode(ack))
        refused = await connection.receive(ANSWER_S)
        assert isinstance(refused, Refused)
        assert "is not the next one of this session" in refused.detail
        assert producer.counters["connections_broken"] == 1
        assert ends == []
        await connection.close()


@in_virtual_time
async def test_a_consumer_that_talks_without_end_leaves_others_their_turn() -> None:
    async with producing() as producer:
        busy, other = await greeted(producer.endpoint), (await dialled(producer.endpoint, identity(OTHER))).connection
        producer.sources.open("t", D, lambda end: None)
        renewal = Renew(consumer=D, producer=P, sequence=1, transfer_ids=["t"])
        busy._writer.write(b"".join(busy._encoded(renewal) for _ in range(300)))
        await other.send(Renew(consumer=OTHER, producer=P, sequence=1, transfer_ids=[]), ANSWER_S)
        reply = asyncio.create_task(other.receive(ANSWER_S))
        answered = 0
        while not reply.done():
            await busy.receive(ANSWER_S)
            answered += 1
        assert isinstance(reply.result(), RenewReply)
        assert answered < 100
        for connection in (busy, other):
            await connection.close()


@in_virtual_time
async def test_a_producer_that_says_nothing_is_given_up() -> None:
    async def serve(connection: Connection) -> None:
        await connection.receive(ANSWER_S)
        with pytest.raises(WireError, match="closed the connection"):
            await read_on(connection)

    async with listening(serve) as endpoint:
        with pytest.raises(HandshakeError, match=r"prefill-0@.* has not proved itself within 10 s"):
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
