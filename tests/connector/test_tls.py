"""Control connections over TLS: both ends, one end, the wrong authority, a certificate whose time is over."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from connector import ConnectorConfig, ConnectorError, HandshakeError, WireError
from connector.connection import Connection
from connector.strangers import MAX_STRANGERS
from connector.tls import Tls, load_tls
from connector.wire import Challenge, Hello
from tests.clock import in_virtual_time, now, until
from tests.connector.fabric import Fabric
from tests.connector.pair import Worker
from tests.connector.pool import D, P
from tests.connector.strangers import ANSWER_S, dialled, listening, producing, raw

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with the openssl command")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def authority(folder: Path, name: str) -> None:
    """A certificate authority of that name."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")
    openssl(folder, "req", "-x509", *key, "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}")


def certificate(folder: Path, name: str, by: str, days: str = "2") -> None:
    """A worker's certificate, signed by an authority."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")
    openssl(folder, "req", *key, "-out", f"{name}.csr", "-subj", f"/CN={name}")
    signed = ("-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-CAcreateserial", "-days", days)
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "others"):
        authority(folder, name)
    certificate(folder, "worker", "ours")
    certificate(folder, "stranger", "others")
    certificate(folder, "old", "ours", days="-1")
    certificate(folder, "locked", "ours")
    openssl(folder, "ec", "-in", "locked.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")
    return folder


def config(folder: Path, name: str = "worker", ca: str = "ours") -> ConnectorConfig:
    return ConnectorConfig(
        tls_cert=str(folder / f"{name}.pem"), tls_key=str(folder / f"{name}.key"), tls_ca=str(folder / f"{ca}.pem")
    )


@pytest.fixture
def tls(folder: Path) -> Tls:
    return load_tls(config(folder))


def foreign(folder: Path, side: int, name: str) -> ssl.SSLContext:
    """A peer that does not look at what it shows, nor at what it is shown."""
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


async def test_with_certificates_of_one_authority_workers_link(folder: Path) -> None:
    fabric = Fabric()
    prefill, decode = Worker(P, fabric, config(folder)), Worker(D, fabric, config(folder))
    await prefill.start()
    await decode.start()
    link = await decode.connector.connect(P, prefill.endpoint)
    assert link.connected
    await decode.connector.close()
    await prefill.connector.close()
    assert (prefill.connector.failure, decode.connector.failure) == (None, None)


@in_virtual_time
async def test_what_is_said_can_be_read_by_nobody(tls: Tls) -> None:
    heard: list[bytes] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            heard.append(data)
            writer.write(data)
        writer.close()

    async with producing(tls=tls.server) as producer:

        async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far = await asyncio.open_connection(producer.endpoint.host, producer.endpoint.port)
            await asyncio.gather(copy(reader, far[1]), copy(far[0], writer))

        async with await asyncio.start_server(tap, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            session = await dialled(type(producer.endpoint)(host, port), tls=tls.client)
            await session.connection.close()
            await until(lambda: producer.counters["connections_broken"] == 1)
    said = b"".join(heard)
    assert len(said) > 1000
    assert P.name.encode() not in said
    assert b"Hello" not in said


# One end only: each says which of the two speaks TLS


@in_virtual_time
async def test_a_plain_consumer_of_a_tls_producer(tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    async with producing(tls=tls.server) as producer:
        with pytest.raises(HandshakeError, match=r"^prefill-0@.* speaks TLS and this end does not; both workers need"):
            await dialled(producer.endpoint)
        await until(lambda: producer.counters["handshakes_refused"] == 1)
    assert "this end speaks TLS and the peer at 127.0.0.1" in caplog.text


@in_virtual_time
async def test_a_tls_consumer_of_a_plain_producer(tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    async with producing() as producer:
        with pytest.raises(HandshakeError, match=r"^this end speaks TLS and prefill-0@.* does not; both workers need"):
            await dialled(producer.endpoint, tls=tls.client)
        await until(lambda: producer.counters["handshakes_refused"] == 1)
    assert "speaks TLS and this end does not" in caplog.text


# Certificates that are not good


@pytest.mark.parametrize(("name", "why"), [("stranger", "unable to get local issuer"), ("old", "has expired")])
@in_virtual_time
async def test_a_producer_with_a_bad_certificate_hears_no_hello(folder: Path, tls: Tls, name: str, why: str) -> None:
    heard: list[Any] = []

    async def serve(connection: Connection) -> None:
        heard.append(await connection.receive(ANSWER_S))

    async with listening(serve, foreign(folder, ssl.PROTOCOL_TLS_SERVER, name)) as endpoint:
        with pytest.raises(HandshakeError, match=rf"the certificate of prefill-0@.* is not good: .*{why}"):
            await dialled(endpoint, tls=tls.client)
    assert heard == []


@pytest.mark.parametrize(("name", "why"), [("stranger", "unable to get local issuer"), ("old", "has expired")])
@in_virtual_time
async def test_a_consumer_with_a_bad_certificate_hears_nothing(
    folder: Path, tls: Tls, name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with producing(tls=tls.server) as producer:
        with pytest.raises(HandshakeError, match=r"if it has refused this end's certificate, its log says why"):
            await dialled(producer.endpoint, tls=foreign(folder, ssl.PROTOCOL_TLS_CLIENT, name))
        await until(lambda: producer.counters["connections_broken"] == 1)
        assert producer.counters["handshakes_accepted"] == 0
    assert why in caplog.text


@in_virtual_time
async def test_a_consumer_without_a_certificate_hears_nothing(tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    async with producing(tls=tls.server) as producer:
        with pytest.raises(HandshakeError, match="broke off"):
            await dialled(producer.endpoint, tls=bare)
        await until(lambda: producer.counters["connections_broken"] == 1)
    assert "did not return a certificate" in caplog.text


@in_virtual_time
async def test_nothing_older_than_tls_1_3_is_spoken(folder: Path, tls: Tls) -> None:
    old = foreign(folder, ssl.PROTOCOL_TLS_CLIENT, "worker")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with producing(tls=tls.server) as producer:
        with pytest.raises(HandshakeError):
            await dialled(producer.endpoint, tls=old)
        await until(lambda: producer.counters["connections_broken"] == 1)


@in_virtual_time
async def test_a_certificate_does_not_replace_the_token(tls: Tls) -> None:
    async with producing(tls=tls.server) as producer:
        connection = await raw(producer.endpoint, tls=tls.client)
        await connection.send(Hello(version=2, consumer=D, producer=P, nonce=b"n" * 32), ANSWER_S)
        assert isinstance(await connection.receive(ANSWER_S), Challenge)
        assert producer.counters["handshakes_accepted"] == 0
        await connection.close()


# Strangers, before and during the TLS handshake


@pytest.mark.parametrize(
    "first", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"], ids=["silent", "one byte", "half"]
)
@in_virtual_time
async def test_strangers_that_stall_before_tls_are_as_few_and_as_brief(tls: Tls, first: bytes) -> None:
    async with producing(tls=tls.server) as producer:
        since = now()
        stalled = [await raw(producer.endpoint, first) for _ in range(2 * MAX_STRANGERS)]
        session = await dialled(producer.endpoint, tls=tls.client)
        assert now() - since < ANSWER_S
        assert producer.counters["strangers_turned_away"] >= MAX_STRANGERS
        await until(lambda: producer.counters["connections_broken"] >= MAX_STRANGERS - 1)
        assert now() - since < 2 * ANSWER_S
        for connection in [session.connection, *stalled]:
            await connection.close()


@in_virtual_time
async def test_nonsense_at_a_tls_listener_is_answered_with_nothing(tls: Tls) -> None:
    async with producing(tls=tls.server) as producer:
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\x16nonsense that is no TLS"):
            connection = await raw(producer.endpoint, nonsense)
            with pytest.raises(WireError, match=r"closed the connection|broke"):
                await connection.receive(ANSWER_S)
            await connection.close()


# Settings


@pytest.mark.parametrize(
    ("name", "ca", "message"),
    [
        ("worker", "nowhere", r"connector.tls_ca .*nowhere.*cannot be used"),
        ("nowhere", "ours", r"connector.tls_cert .*nowhere.pem.* cannot be used"),
        ("locked", "ours", r"connector.tls_cert .*locked.pem.* the key is encrypted"),
        ("stranger", "ours", r"stranger.pem' is not good for peers that trust tls_ca .*: .*local issuer"),
        ("old", "ours", r"old.pem' is not good for peers that trust tls_ca .*: certificate has expired"),
    ],
)
async def test_files_that_cannot_be_used_are_named_before_anything_starts(
    folder: Path, name: str, ca: str, message: str
) -> None:
    with pytest.raises(ConnectorError, match=message):
        Worker(P, Fabric(), config(folder, name, ca))


async def test_a_key_of_another_certificate_is_named(folder: Path) -> None:
    mixed = ConnectorConfig(
        tls_cert=str(folder / "worker.pem"), tls_key=str(folder / "stranger.key"), tls_ca=str(folder / "ours.pem")
    )
    with pytest.raises(ConnectorError, match=r"connector.tls_cert .*worker.pem.* cannot be used"):
        Worker(P, Fabric(), mixed)
