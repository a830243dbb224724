"""Starting, closing and failing as a whole; in virtual time."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from connector import (
    Connector,
    ConnectorConfig,
    ConnectorError,
    EngineId,
    HandshakeError,
    ImportFailed,
    IncompatibleError,
    InvalidTransition,
    ListenerError,
    RegistrationError,
    TransportError,
    UnreachableError,
    new_transfer_id,
)
from tests.clock import in_virtual_time, until
from tests.connector.cable import Cable
from tests.connector.fabric import Fabric, FabricTransport
from tests.connector.pair import Held, Pair, Reading, Worker, connected
from tests.connector.pool import TOKEN, D, P, Pool, compatibility


@in_virtual_time
async def test_a_wrong_token_never_links() -> None:
    async with connected() as pair:
        stranger = Worker(EngineId("decode-1", 5), pair.fabric, token=b"another")
        await stranger.start()
        with pytest.raises(HandshakeError, match="the cluster token is not known"):
            await stranger.connector.connect(P, pair.prefill.endpoint)
        assert stranger.connector.link(P.name) is None
        await stranger.connector.close()


@in_virtual_time
async def test_incompatible_workers_never_link() -> None:
    async with connected() as pair:
        other = Worker(EngineId("decode-1", 5), pair.fabric, cache_dtype="float8_e4m3")
        await other.start()
        with pytest.raises(IncompatibleError, match="cache_dtype: ours 'float8_e4m3', theirs 'bfloat16'"):
            await other.connector.connect(P, pair.prefill.endpoint)
        await other.connector.close()


@in_virtual_time
async def test_closing_settles_imports_ends_sources_and_frees_the_port() -> None:
    async with connected(automatic=False) as pair:
        held, pull, source = pair.source()
        forgotten, _, _ = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        await asyncio.gather(*(pair.decode.connector.close() for _ in range(3)))
        assert len(reading.outcomes) == 1
        with pytest.raises(ImportFailed):
            await reading.task
        assert [held.ends[0].outcome, forgotten.ends[0].outcome] == ["released", "released"]
        last = Held(pair.prefill, D, new_transfer_id())
        await pair.prefill.connector.close()
        assert [end.outcome for end in last.ends] == ["failed"]
        with pytest.raises(InvalidTransition, match="was closed"):
            Held(pair.prefill, D, new_transfer_id())
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind((pair.prefill.endpoint.host, pair.prefill.endpoint.port))
        for closed in (pair.decode.connector, pair.prefill.connector):
            with pytest.raises(ConnectorError):
                await closed.start()
            with pytest.raises(ConnectorError, match="is not running"):
                await closed.connect(P, pair.prefill.endpoint)


@in_virtual_time
async def test_a_producer_that_drains_waits_for_its_sources() -> None:
    async with connected() as pair:
        assert await pair.prefill.connector.sources.drained(1.0)
        _, pull, source = pair.source()
        assert not await pair.prefill.connector.sources.drained(10.0)
        draining = asyncio.create_task(pair.prefill.connector.sources.drained(100.0))
        await Reading(pair.decode, pull, source).task
        assert await draining


@in_virtual_time
async def test_a_busy_port_is_named_and_nothing_is_left_behind() -> None:
    async with connected() as pair:
        port = pair.prefill.endpoint.port
        second = Worker(EngineId("prefill-1", 3), pair.fabric, ConnectorConfig(port=port))
        with pytest.raises(ListenerError, match=str(port)):
            await second.start()
        await second.connector.close()


@in_virtual_time
async def test_a_transport_that_cannot_be_used_says_why_and_frees_the_port() -> None:
    def unusable() -> FabricTransport:
        raise TransportError("no such hardware")

    pool = Pool()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        connector = Connector(
            ConnectorConfig(port=port),
            P,
            pool.memory,
            pool.geometry,
            compatibility(),
            TOKEN,
            transports={"fabric": unusable},
        )
        with pytest.raises(
            RegistrationError, match=r"no transport can be used by this worker \(fabric: no such hardware"
        ):
            await connector.start()
        await connector.close()


@in_virtual_time
async def test_a_faulty_transport_closes_the_connector_loudly(caplog: pytest.LogCaptureFixture) -> None:
    fabric = Fabric(automatic=False)
    prefill, decode = Worker(P, fabric), Worker(D, fabric)
    await prefill.start()
    await decode.start()
    link = await decode.connector.connect(P, prefill.endpoint)
    pair = Pair(fabric, prefill, decode, Cable(prefill.endpoint), link)
    _, pull, source = pair.source()
    reading = Reading(decode, pull, source)
    await until(lambda: len(fabric.in_flight) == 1)
    fabric.ends[decode.end].break_down(RuntimeError("the progress thread died"))
    await reading.settled.wait()
    with pytest.raises(ImportFailed):
        await reading.task
    await until(lambda: decode.connector.failure is not None)
    with pytest.raises(ConnectorError, match="has failed: the progress thread died"):
        await decode.connector.connect(P, prefill.endpoint)
    assert "has failed and closes" in caplog.text
    await decode.connector.close()
    await prefill.connector.close()
    assert len(decode.pool.free) == 16


@in_virtual_time
async def test_a_token_and_a_fitting_pool_are_required() -> None:
    pool = Pool()
    with pytest.raises(ConnectorError, match="token is empty"):
        Connector(ConnectorConfig(), P, pool.memory, pool.geometry, compatibility(), b"")
    with pytest.raises(ConnectorError, match="the pool's memory has"):
        Connector(ConnectorConfig(), P, pool.memory, Pool(5).geometry, compatibility(), TOKEN)


@in_virtual_time
async def test_an_owner_that_raises_does_not_keep_others_from_settling(caplog: pytest.LogCaptureFixture) -> None:
    def raises(outcome: object) -> None:
        raise ValueError("the owner's mistake")

    async with connected() as pair:
        held, pull, source = pair.source()
        blocks = pair.decode.pool.take(3)
        await pull.read(source, {"full": blocks}, raises)
        await held.ended.wait()
        assert held.ends[0].outcome == "released"
        assert "the owner's mistake" in caplog.text


@in_virtual_time
async def test_the_transport_in_use_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with connected() as pair:
        assert pair.link.transport == "fabric"
        assert f"linked to {P}" in caplog.text
        assert "pages by fabric" in caplog.text


@in_virtual_time
async def test_a_peer_that_no_transport_reaches_is_an_error() -> None:
    async with connected() as pair:
        pair.fabric.kill(pair.prefill.end, reported=False)
        other = Worker(EngineId("decode-1", 5), pair.fabric)
        await other.start()
        with pytest.raises(UnreachableError, match=r"fabric: prefill-0@.* is not on this fabric"):
            await other.connector.connect(P, pair.prefill.endpoint)
        await other.connector.close()
