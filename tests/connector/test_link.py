"""What a link does when its peer dies, hangs, is cut off or starts again; in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from connector import (
    ConnectorConfig,
    EngineId,
    ImportFailed,
    Listeners,
    ListenOn,
    PeerLostError,
    PlanError,
    Reason,
    WrongIncarnationError,
    new_transfer_id,
)
from connector.connector import TICK_S
from tests.clock import in_virtual_time, now, until
from tests.connector.pair import Reading, Worker, connected
from tests.connector.pool import P

IMPORT_S = ConnectorConfig().import_timeout_s


# Lost peers


@in_virtual_time
async def test_a_producer_that_dies_during_the_read_fails_it_after_the_fence() -> None:
    async with connected(automatic=False) as pair:
        _, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        (batch,) = pair.fabric.in_flight
        batch.move()
        pair.fabric.kill(pair.prefill.end)
        failed = await reading.failure()
        assert failed.reason == Reason.PEER_LOST
        batch.move()
        assert len(pair.decode.pool.free) == 16


@in_virtual_time
async def test_a_producer_that_hangs_times_the_read_out() -> None:
    """A stopped process reports nothing: only the import's own deadline ends it, and the fence frees its blocks."""
    async with connected(automatic=False) as pair:
        _, pull, source = pair.source()
        pair.fabric.kill(pair.prefill.end, reported=False)
        before = now()
        reading = Reading(pair.decode, pull, source)
        failed = await reading.failure()
        assert failed.reason == Reason.TIMEOUT
        assert IMPORT_S <= now() - before <= IMPORT_S + TICK_S
        assert len(pair.decode.pool.free) == 16


@in_virtual_time
async def test_a_transport_that_finds_its_peer_late_fails_the_read() -> None:
    async with connected(automatic=False) as pair:
        _, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        (batch,) = pair.fabric.in_flight
        assert batch.timeout_s == IMPORT_S
        batch.outlive()
        failed = await reading.failure()
        assert (failed.reason, failed.detail) == (Reason.PEER_LOST, f"batch {batch.number} was not over within 30 s")
        assert len(pair.decode.pool.free) == 16


@in_virtual_time
async def test_a_lost_completion_does_not_wedge_the_consumer() -> None:
    async with connected(automatic=False) as pair:
        _, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        pair.fabric.in_flight[0].lose()
        assert (await reading.failure()).reason == Reason.TIMEOUT
        await until(lambda: pair.link.connected)
        pair.fabric.automatic = True
        held, pull, source = pair.source(seed=9)
        reading = Reading(pair.decode, pull, source)
        await reading.task
        assert pair.decode.pool.holds(reading.blocks, 9)
        await held.ended.wait()


@in_virtual_time
async def test_an_error_fails_the_import_and_releases_the_source() -> None:
    async with connected(automatic=False) as pair:
        held, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        pair.fabric.in_flight[0].fail("remote access error")
        failed = await reading.failure()
        assert (failed.reason, failed.detail) == (Reason.TRANSFER_ERROR, "remote access error")
        await held.ended.wait()
        assert pair.all_free()


@in_virtual_time
async def test_repeated_completions_are_ignored() -> None:
    async with connected(automatic=False) as pair:
        _, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        (batch,) = pair.fabric.in_flight
        batch.succeed()
        batch.repeat()
        await reading.task
        batch.repeat()
        await until(lambda: pair.decode.count("completions_late") == 2)
        assert len(reading.outcomes) == 1


@in_virtual_time
async def test_a_cut_control_connection_does_not_disturb_a_read() -> None:
    async with connected(automatic=False) as pair:
        held, pull, source = pair.source(seed=4)
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        await pair.cable.cut()
        pair.cable.mend()
        await until(lambda: pair.link.connected)
        await asyncio.sleep(IMPORT_S - 10)
        pair.fabric.in_flight[0].succeed()
        await reading.task
        assert pair.decode.pool.holds(reading.blocks, 4)
        await held.ended.wait()
        assert held.ends[0].outcome == "released"


@in_virtual_time
async def test_a_silent_producer_is_dropped_and_dialled_again() -> None:
    async with connected() as pair:
        pair.cable.stall()
        await until(lambda: len(pair.cable.attempts) >= 2, within_s=60.0)
        pair.cable.mend()
        await until(lambda: pair.link.connected)
        held, pull, source = pair.source()
        await Reading(pair.decode, pull, source).task
        await held.ended.wait()


@in_virtual_time
async def test_a_lost_peer_is_dialled_again_after_one_second_doubling_to_sixty() -> None:
    async with connected() as pair:
        await pair.cable.cut()
        lost_at = now()
        await until(lambda: len(pair.cable.attempts) == 10)
        waits = [round(at - lost_at) for at in pair.cable.attempts[1:]]
        assert waits == [1, 3, 7, 15, 31, 63, 123, 183, 243]
        pair.cable.mend()
        await until(lambda: pair.link.connected)


@in_virtual_time
async def test_a_restarted_producer_is_another_peer() -> None:
    listeners = Listeners()
    (listener,) = listeners.allocate(ListenOn("127.0.0.1", range(1)))
    listeners.close()
    fixed = ConnectorConfig(port=listener.endpoint.port)
    async with connected(automatic=False, prefill_config=fixed) as pair:
        _, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        await pair.prefill.connector.close()
        restarted = Worker(EngineId(P.name, 99), pair.fabric, fixed)
        await restarted.start()
        assert (await reading.failure()).reason == Reason.PEER_LOST
        await until(lambda: pair.decode.connector.link(P.name) is None)
        assert pair.link.gone
        with pytest.raises(PeerLostError, match="is gone"):
            pair.decode.connector.begin(pair.link, new_transfer_id())
        with pytest.raises(WrongIncarnationError):
            await pair.decode.connector.connect(P, restarted.endpoint)
        link = await pair.decode.connector.connect(restarted.engine_id, restarted.endpoint)
        assert pair.decode.connector.link(P.name) is link
        await restarted.connector.close()


@in_virtual_time
async def test_a_new_incarnation_replaces_the_link_to_the_old_one() -> None:
    async with connected(automatic=False) as pair:
        held, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        restarted = Worker(EngineId(P.name, 99), pair.fabric)
        await restarted.start()
        link = await pair.decode.connector.connect(restarted.engine_id, restarted.endpoint)
        assert (await reading.failure()).reason == Reason.PEER_LOST
        assert pair.decode.connector.link(P.name) is link
        await held.ended.wait()
        await restarted.connector.close()


# Links


@in_virtual_time
async def test_connecting_again_returns_the_same_link() -> None:
    async with connected() as pair:
        again = await asyncio.gather(*(pair.decode.connector.connect(P, pair.cable.endpoint) for _ in range(5)))
        assert all(link is pair.link for link in again)
        assert pair.prefill.count("handshakes_accepted") == 1


@in_virtual_time
async def test_connecting_at_once_shakes_hands_once() -> None:
    async with connected() as pair:
        decode = Worker(EngineId("decode-1", 5), pair.fabric)
        await decode.start()
        links = await asyncio.gather(*(decode.connector.connect(P, pair.prefill.endpoint) for _ in range(5)))
        assert len({id(link) for link in links}) == 1
        assert pair.prefill.count("handshakes_accepted") == 2
        await decode.connector.close()


@in_virtual_time
async def test_a_disconnected_peer_settles_and_releases() -> None:
    async with connected(automatic=False) as pair:
        held, pull, source = pair.source()
        waiting, _, _ = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        await pair.decode.connector.disconnect(P.name)
        assert len(reading.outcomes) == 1
        with pytest.raises(ImportFailed):
            await reading.task
        assert [held.ends[0].outcome, waiting.ends[0].outcome] == ["released", "released"]
        assert pair.decode.connector.link(P.name) is None
        await pair.decode.connector.disconnect(P.name)
        assert pair.all_free()


@in_virtual_time
async def test_a_measurement_gives_the_blocks_back_untouched_by_later_writes() -> None:
    async with connected(automatic=False) as pair:
        pair.fabric.on_post = lambda batch: batch.succeed()
        blocks = pair.decode.pool.take(4)
        assert await pair.decode.connector.measure(pair.link, blocks) > 0
        assert pair.link.gb_per_s > 0
        assert pair.decode.connector.stats().links[0].gb_per_s == pair.link.gb_per_s
        assert pair.decode.count("bytes_imported") == 0
        pair.decode.pool.give_back(blocks)


@in_virtual_time
async def test_a_cancelled_measurement_waits_until_nothing_writes() -> None:
    async with connected(automatic=False) as pair:
        blocks = pair.decode.pool.take(4)
        measuring = asyncio.create_task(pair.decode.connector.measure(pair.link, blocks))
        await until(lambda: len(pair.fabric.in_flight) == 1)
        (batch,) = pair.fabric.in_flight
        measuring.cancel()
        await asyncio.sleep(1.0)
        assert not measuring.done()
        batch.succeed()
        with pytest.raises(asyncio.CancelledError):
            await measuring
        pair.decode.pool.give_back(blocks)


@in_virtual_time
async def test_a_measurement_over_a_dying_link_fails() -> None:
    async with connected(automatic=False) as pair:
        blocks = pair.decode.pool.take(4)
        measuring = asyncio.create_task(pair.decode.connector.measure(pair.link, blocks))
        await until(lambda: len(pair.fabric.in_flight) == 1)
        pair.fabric.kill(pair.prefill.end)
        with pytest.raises(PeerLostError, match="PEER_LOST"):
            await measuring
        with pytest.raises(PlanError):
            await pair.decode.connector.measure(pair.link, [99])
        pair.decode.pool.give_back(blocks)


@in_virtual_time
async def test_a_producer_that_does_not_answer_gets_no_new_work_and_recovers() -> None:
    async with connected() as pair:
        assert pair.link.connected
        pair.cable.stall()
        await until(lambda: not pair.link.connected)
        assert not pair.link.gone
        pair.cable.mend()
        await until(lambda: pair.link.connected)
