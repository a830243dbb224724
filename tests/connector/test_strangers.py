"""Connections that never prove anything: they are few, brief, and quiet in the log, and keep nobody out."""

from __future__ import annotations

import asyncio
import logging

import pytest

from connector import WireError
from connector.strangers import MAX_STRANGERS, QUIET_S
from connector.wire import Bye, Challenge, Hello, Proof, Renew, RenewReply
from tests.clock import in_virtual_time, now, until
from tests.connector.pool import D, P
from tests.connector.strangers import ANSWER_S, Producer, greeted, producing, raw

HELLO = Hello(version=2, consumer=D, producer=P, nonce=b"n" * 32)


async def broken(producer: Producer, connections: int) -> None:
    """So many have been dropped since the last such call."""
    await until(lambda: producer.counters["connections_broken"] == connections)
    producer.counters["connections_broken"] = 0


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
async def test_a_flood_of_strangers_keeps_no_peer_out() -> None:
    async with producing() as producer:
        silent = [await raw(producer.endpoint) for _ in range(500)]
        good = await greeted(producer.endpoint)
        assert producer.counters["strangers_turned_away"] >= 500 - MAX_STRANGERS
        assert producer.counters["handshakes_accepted"] == 1
        for connection in [good, *silent]:
            await connection.close()


@in_virtual_time
async def test_the_oldest_stranger_goes_when_there_are_too_many() -> None:
    async with producing() as producer:
        strangers = []
        for _ in range(MAX_STRANGERS + 2):
            strangers.append(await raw(producer.endpoint))
            await asyncio.sleep(ANSWER_S / 1000)  # virtual: until it has been taken
        for gone in strangers[:2]:
            with pytest.raises(WireError, match=r"closed the connection|broke"):
                await gone.receive(ANSWER_S / 100)
        for stays in strangers[2:]:
            with pytest.raises(WireError, match="no whole frame came"):
                await stays.receive(ANSWER_S / 1000)
        for connection in strangers:
            await connection.close()


@in_virtual_time
async def test_a_stranger_that_drips_is_gone_when_its_time_is_over() -> None:
    async with producing() as producer:
        dripping = await raw(producer.endpoint, (100).to_bytes(4, "big"))
        loop = asyncio.get_running_loop()
        before = loop.time()

        async def drip() -> None:
            while True:
                dripping._writer.write(b"x")
                await asyncio.sleep(ANSWER_S / 20)

        dripper = asyncio.create_task(drip())
        with pytest.raises(WireError):
            await dripping.receive(10 * ANSWER_S)
        assert loop.time() - before < 2 * ANSWER_S
        dripper.cancel()
        await asyncio.gather(dripper, return_exceptions=True)
        await dripping.close()


@in_virtual_time
async def test_a_stranger_has_one_deadline_for_all_it_says() -> None:
    """Each of its frames would have come in time."""
    async with producing() as producer:
        since = now()
        connection = await raw(producer.endpoint)
        await asyncio.sleep(0.8 * ANSWER_S)
        await connection.send(HELLO, ANSWER_S)
        assert isinstance(await connection.receive(ANSWER_S), Challenge)
        with pytest.raises(WireError):
            await connection.receive(10 * ANSWER_S)
        assert now() - since < 1.1 * ANSWER_S
        await connection.close()


@in_virtual_time
async def test_peers_that_have_proved_themselves_are_not_turned_away() -> None:
    async with producing() as producer:
        peer = await greeted(producer.endpoint)
        strangers = [await raw(producer.endpoint) for _ in range(2 * MAX_STRANGERS)]
        await until(lambda: producer.counters["strangers_turned_away"] == MAX_STRANGERS)
        await peer.send(Renew(consumer=D, producer=P, sequence=1, transfer_ids=[]), ANSWER_S)
        assert isinstance(await peer.receive(ANSWER_S), RenewReply)
        assert producer.counters["connections_broken"] == 0
        for connection in [peer, *strangers]:
            await connection.close()


@in_virtual_time
async def test_strangers_come_in_again_when_others_have_gone() -> None:
    async with producing() as producer:
        for _ in range(3):
            strangers = [await raw(producer.endpoint) for _ in range(MAX_STRANGERS)]
            for connection in strangers:
                await connection.close()
            await broken(producer, MAX_STRANGERS)
        assert producer.counters["strangers_turned_away"] == 0


@in_virtual_time
async def test_a_stranger_is_not_told_that_the_worker_leaves() -> None:
    async with producing() as producer:
        stranger, peer = await raw(producer.endpoint), await greeted(producer.endpoint)
        await stranger.send(HELLO, ANSWER_S)
        assert isinstance(await stranger.receive(ANSWER_S), Challenge)
        await producer.acceptor.close()
        with pytest.raises(WireError):
            await stranger.receive(ANSWER_S)
        assert await peer.receive(ANSWER_S) == Bye(reason="closing")
        for connection in (stranger, peer):
            await connection.close()


@in_virtual_time
async def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with producing() as producer:
        for _ in range(100):
            connection = await raw(producer.endpoint, b"nonsense")
            await broken(producer, 1)
            await connection.close()
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert 1 <= len(lines) <= 3
        await asyncio.sleep(QUIET_S)
        connection = await raw(producer.endpoint, b"nonsense")
        await until(lambda: "more since the last such line" in caplog.text)
        await connection.close()


@in_virtual_time
async def test_what_a_stranger_says_is_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    forged = "x\nCRITICAL all is lost\x1b[2J" + "y" * 2000
    async with producing() as producer:
        connection = await raw(producer.endpoint)
        consumer = type(D)(forged, 1)
        await connection.send(Hello(version=2, consumer=consumer, producer=P, nonce=b"n" * 32), ANSWER_S)
        await connection.receive(ANSWER_S)
        await connection.send(Proof(mac=b"x" * 32), ANSWER_S)
        await connection.receive(ANSWER_S)
        await until(lambda: producer.counters["handshakes_refused"] == 1)
        await connection.close()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "x?CRITICAL all is lost?[2Jyyy" in line
    assert len(line) < 500
