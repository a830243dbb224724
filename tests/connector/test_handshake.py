"""Both ends of the handshake, against honest, foreign, lying and silent peers."""

from __future__ import annotations

import asyncio
import hmac
import logging

import msgspec
import pytest

from connector import (
    EngineId,
    HandshakeError,
    IncompatibleError,
    UnreachableError,
    WireError,
    WrongIncarnationError,
)
from connector.connection import Connection
from connector.wire import Bye, Challenge, Frame, Hello, Proof, Record, Refused
from tests.clock import in_virtual_time, now, until
from tests.connector.pool import TOKEN, D, P
from tests.connector.strangers import (
    ANSWER_S,
    LEASE_S,
    POOL,
    dialled,
    identity,
    listening,
    producing,
    raw,
    read_on,
)

HELLO = Hello(version=2, consumer=D, producer=P, nonce=b"n" * 32)


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
        with pytest.raises(HandshakeError, match=r"refused \(unauthorized\): the cluster token is not known"):
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
        assert heard == [Refused(reason="unauthorized", detail="the cluster token is not known")]


@in_virtual_time
async def test_another_incarnation_is_refused() -> None:
    async with producing() as producer:
        with pytest.raises(WrongIncarnationError, match=r"is gone: .*000000000000000b"):
            await dialled(producer.endpoint, producer=EngineId(P.name, 99))


@in_virtual_time
async def test_differing_records_are_refused_by_name_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async with producing() as producer:
        with pytest.raises(IncompatibleError) as refused:
            await dialled(producer.endpoint, identity(D, dtype="float32", tp_size=2))
        assert refused.value.differences == {"dtype": ("float32", "bfloat16"), "tp_size": (2, 1)}
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
        assert "version 2 of the protocol" in refused.detail
        assert "version 99" in refused.detail
        assert all(engine.name not in refused.detail for engine in (P, D))  # a stranger learns nothing else
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
    ours, theirs = (mac(token, f"{role}'s frames", hello, challenge) for role in ("producer", "consumer"))
    connection.seal(ours, theirs)
    await connection.receive(ANSWER_S)
    await connection.send(record, ANSWER_S)
    await connection.receive(ANSWER_S)


def mac(token: bytes, role: str, hello: Hello, challenge: Challenge) -> bytes:
    fields = (role, 2, hello.consumer, hello.producer, hello.nonce, challenge.nonce)
    return hmac.new(token, msgspec.msgpack.encode(fields), "sha256").digest()


# Proofs cannot be borrowed


@in_virtual_time
async def test_a_replayed_proof_is_refused() -> None:
    hello = Hello(version=2, consumer=D, producer=P, nonce=b"n" * 32)
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
async def test_a_reflected_proof_is_refused() -> None:
    """Who does not know the token cannot answer with the proof that it has just been given."""

    async def serve(connection: Connection) -> None:
        await connection.receive(ANSWER_S)
        await connection.send(Challenge(nonce=b"m" * 32), ANSWER_S)
        proof = await connection.receive(ANSWER_S)
        await connection.send(proof, ANSWER_S)
        await connection.receive(ANSWER_S)

    async with listening(serve) as endpoint:
        with pytest.raises(HandshakeError, match="does not know the cluster token"):
            await dialled(endpoint)


@in_virtual_time
async def test_a_proof_towards_another_worker_is_refused() -> None:
    """A listener cannot pass on what it was told: the proof names whom it was meant for."""
    meant = Hello(version=2, consumer=D, producer=EngineId("prefill-7", 7), nonce=b"n" * 32)
    async with producing() as producer:
        connection = await raw(producer.endpoint)
        await connection.send(HELLO, ANSWER_S)
        challenge = await connection.receive(ANSWER_S)
        assert isinstance(challenge, Challenge)
        await connection.send(Proof(mac=mac(TOKEN, "consumer", meant, challenge)), ANSWER_S)
        refused = await connection.receive(ANSWER_S)
        assert refused == Refused(reason="unauthorized", detail="the cluster token is not known")
        await connection.close()


@in_virtual_time
async def test_a_stranger_learns_no_proof_from_a_listener() -> None:
    async with producing() as producer:
        connection = await raw(producer.endpoint)
        await connection.send(Hello(version=2, consumer=D, producer=P, nonce=b"n" * 32), ANSWER_S)
        assert isinstance(await connection.receive(ANSWER_S), Challenge)
        await connection.send(Proof(mac=b""), ANSWER_S)
        refused = await connection.receive(ANSWER_S)
        assert refused == Refused(reason="unauthorized", detail="the cluster token is not known")
        await connection.close()


@in_virtual_time
async def test_a_stranger_does_not_learn_who_listens() -> None:
    """Whatever engine it asks for, it is answered the same."""
    async with producing() as producer:
        answers = []
        for asked in (P, EngineId(P.name, 99), EngineId("nobody", 1)):
            connection = await raw(producer.endpoint)
            await connection.send(Hello(version=2, consumer=D, producer=asked, nonce=b"n" * 32), ANSWER_S)
            assert isinstance(await connection.receive(ANSWER_S), Challenge)
            await connection.send(Proof(mac=b"x" * 32), ANSWER_S)
            answers.append(await connection.receive(ANSWER_S))
            await connection.close()
        assert answers == [Refused(reason="unauthorized", detail="the cluster token is not known")] * 3


@in_virtual_time
async def test_that_a_peer_is_gone_has_to_be_proved() -> None:
    """Anybody on the way could say so, and pages would be given up that are still written."""

    async def serve(connection: Connection) -> None:
        await connection.receive(ANSWER_S)
        gone = Refused(reason="incarnation", detail="dead", engine=EngineId(P.name, 99))
        await connection.send(gone, ANSWER_S)

    async with listening(serve) as endpoint:
        with pytest.raises(HandshakeError) as refused:
            await dialled(endpoint)
        assert not isinstance(refused.value, WrongIncarnationError)


@in_virtual_time
async def test_that_records_differ_has_to_be_proved() -> None:
    async def serve(connection: Connection) -> None:
        await connection.receive(ANSWER_S)
        differ = Refused(reason="incompatible", detail="no", differences={"dtype": ("float32", "bfloat16")})
        await connection.send(differ, ANSWER_S)

    async with listening(serve) as endpoint:
        with pytest.raises(HandshakeError) as refused:
            await dialled(endpoint)
        assert not isinstance(refused.value, IncompatibleError)


@pytest.mark.parametrize("nonsense", [b"\xc1\xc1\xc1", b"x" * 5000])
@in_virtual_time
async def test_a_producer_that_has_proved_nothing_is_not_told_what_was_wrong(nonsense: bytes) -> None:
    heard: list[Frame] = []

    async def serve(connection: Connection) -> None:
        await connection.receive(ANSWER_S)
        connection._writer.write(len(nonsense).to_bytes(4, "big") + nonsense)
        with pytest.raises(WireError):
            heard.append(await connection.receive(ANSWER_S))

    async with listening(serve) as endpoint:
        with pytest.raises(HandshakeError, match="broke off"):
            await dialled(endpoint)
    assert heard == []


@in_virtual_time
async def test_a_producer_has_one_deadline_to_prove_itself() -> None:
    """Each of its frames would have come in time."""

    async def serve(connection: Connection) -> None:
        await connection.receive(ANSWER_S)
        await asyncio.sleep(0.8 * ANSWER_S)
        await connection.send(Challenge(nonce=b"m" * 32), ANSWER_S)
        with pytest.raises(WireError):
            await read_on(connection)

    async with listening(serve) as endpoint:
        since = now()
        with pytest.raises(HandshakeError, match="has not proved itself within 10 s"):
            await dialled(endpoint)
        assert now() - since < 1.1 * ANSWER_S


@in_virtual_time
async def test_secrets_stay_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = [TOKEN, b"another token", b"n" * 32]
    async with producing() as producer:
        session = await dialled(producer.endpoint)
        with pytest.raises(HandshakeError):
            await dialled(producer.endpoint, identity(D, token=b"another token"))
        connection = await raw(producer.endpoint)
        await connection.send(HELLO, ANSWER_S)
        challenge = await connection.receive(ANSWER_S)
        assert isinstance(challenge, Challenge)
        proof = mac(TOKEN, "consumer", HELLO, challenge)
        await connection.send(Proof(mac=proof[:-1] + b"x"), ANSWER_S)
        assert isinstance(await connection.receive(ANSWER_S), Refused)
        secrets += [challenge.nonce, proof]
        for end in (session.connection, connection):
            await end.close()
    logged = caplog.text + repr(identity(D))
    for secret in secrets:
        assert secret.hex() not in logged
        assert repr(secret)[2:-1] not in logged


@in_virtual_time
async def test_another_worker_at_that_address_does_not_prove_it_either() -> None:
    async with producing() as producer:
        with pytest.raises(HandshakeError, match="asked for prefill-7") as refused:
            await dialled(producer.endpoint, producer=EngineId("prefill-7", 99))
        assert not isinstance(refused.value, WrongIncarnationError)


@in_virtual_time
async def test_a_short_nonce_is_refused() -> None:
    async with producing() as producer:
        connection = await raw(producer.endpoint)
        hello = Hello(version=2, consumer=D, producer=P, nonce=b"")
        await connection.send(hello, ANSWER_S)
        challenge = await connection.receive(ANSWER_S)
        assert isinstance(challenge, Challenge)
        await connection.send(Proof(mac=mac(TOKEN, "consumer", hello, challenge)), ANSWER_S)
        refused = await connection.receive(ANSWER_S)
        assert isinstance(refused, Refused)
        assert refused.reason == "unauthorized"
        await connection.close()
