"""Two workers, end to end: over real loopback connections and the scripted fabric, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import msgspec
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
    Listeners,
    ListenOn,
    PeerLostError,
    PlanError,
    Reason,
    RegistrationError,
    TransportError,
    UnreachableError,
    WrongIncarnationError,
    new_transfer_id,
)
from connector.connector import TICK_S
from tests.clock import in_virtual_time, until
from tests.connector.cable import Cable
from tests.connector.fabric import Fabric, FabricTransport
from tests.connector.pair import Held, Pair, Reading, Worker, connected
from tests.connector.pool import TOKEN, D, P, Pool, compatibility

LEASE_S = ConnectorConfig().lease_s
IMPORT_S = ConnectorConfig().import_timeout_s


def now() -> float:
    return asyncio.get_running_loop().time()


async def failure(reading: Reading) -> ImportFailed:
    with pytest.raises(ImportFailed) as failed:
        await reading.task
    assert len(reading.outcomes) == 1
    assert (reading.outcomes[0].outcome, reading.outcomes[0].reason) == ("failed", failed.value.reason)
    return failed.value


def all_free(pair: Pair) -> bool:
    return all(len(worker.pool.free) == 16 for worker in (pair.prefill, pair.decode))


# The way it should go


@in_virtual_time
async def test_pages_arrive_and_the_ack_frees_the_source() -> None:
    async with connected() as pair:
        held, pull, source = pair.source(num_tokens=10, seed=7)
        reading = Reading(pair.decode, pull, source)
        imported = await reading.task
        assert (imported.num_tokens, imported.transport) == (10, "fabric")
        assert (imported.bytes, imported.operations) == (3 * pair.decode.pool.block_bytes, 1)
        assert [outcome.outcome for outcome in reading.outcomes] == ["published"]
        assert pair.decode.pool.holds(reading.blocks, 7)
        before = now()
        await held.ended.wait()
        assert now() - before < 1.0  # by the ACK, not by the lease
        assert [end.outcome for end in held.ends] == ["released"]
        assert pair.decode.count("bytes_imported") == imported.bytes
        stats = pair.decode.connector.stats()
        assert (stats.imports_active, [link.name for link in stats.links]) == (0, [P.name])
        assert pair.prefill.connector.stats().sources_held == 0


@in_virtual_time
async def test_many_transfers_at_once_each_get_their_own_pages() -> None:
    async with connected(automatic=False) as pair:
        transfers = [pair.source(num_tokens=8, seed=seed) for seed in range(8)]
        readings = [Reading(pair.decode, pull, source) for _, pull, source in transfers]
        await until(lambda: len(pair.fabric.in_flight) == 8)
        for batch in reversed(pair.fabric.in_flight):
            batch.succeed()
        await asyncio.gather(*(reading.task for reading in readings))
        assert all(pair.decode.pool.holds(reading.blocks, seed) for seed, reading in enumerate(readings))
        await asyncio.gather(*(held.ended.wait() for held, _, _ in transfers))


@in_virtual_time
async def test_a_slow_prefill_and_a_slow_read_are_renewed() -> None:
    config = ConnectorConfig(import_timeout_s=1000.0)
    async with connected(automatic=False, config=config) as pair:
        pull = pair.decode.connector.begin(pair.link, new_transfer_id())
        held = Held(pair.prefill, D, pull.transfer_id)
        await asyncio.sleep(10 * LEASE_S)
        reading = Reading(pair.decode, pull, held.hold(10, seed=3))
        await asyncio.sleep(10 * LEASE_S)
        assert held.ends == []
        pair.fabric.in_flight[0].succeed()
        await reading.task
        assert pair.decode.pool.holds(reading.blocks, 3)
        assert pair.prefill.count("sources_long_held") > 0


@in_virtual_time
async def test_a_request_that_arrives_late_is_renewed_as_soon_as_it_is_there() -> None:
    async with connected() as pair:
        pull = pair.decode.connector.begin(pair.link, new_transfer_id())
        await asyncio.sleep(2 * LEASE_S)  # the call stood in a queue
        held = Held(pair.prefill, D, pull.transfer_id)
        await asyncio.sleep(10.0)
        await Reading(pair.decode, pull, held.hold(10, seed=3)).task


# Giving up


@in_virtual_time
async def test_a_release_without_pages_frees_the_source_at_once() -> None:
    async with connected() as pair:
        held, pull, _ = pair.source()
        await pull.release("client gone")
        assert [(end.outcome, end.detail) for end in held.ends] == [("released", "client gone")]
        await pull.release("again")
        assert len(held.ends) == 1


@in_virtual_time
async def test_a_release_stops_a_computation() -> None:
    async with connected() as pair:
        pull = pair.decode.connector.begin(pair.link, new_transfer_id())
        held = Held(pair.prefill, D, pull.transfer_id)
        await pull.release("client gone")
        assert [end.outcome for end in held.ends] == ["failed"]
        with pytest.raises(InvalidTransition):
            pair.prefill.connector.sources.hold(pull.transfer_id, {"full": [0]}, 3)


@in_virtual_time
async def test_a_release_that_overtakes_the_request_refuses_it() -> None:
    async with connected() as pair:
        pull = pair.decode.connector.begin(pair.link, new_transfer_id())
        await pull.release("client gone")
        with pytest.raises(InvalidTransition, match="given up by its consumer before it began"):
            Held(pair.prefill, D, pull.transfer_id)


@in_virtual_time
async def test_a_release_after_the_read_changes_nothing() -> None:
    async with connected() as pair:
        held, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await reading.task
        await pull.release("done")
        await held.ended.wait()
        assert held.ends[0].detail == "published"
        assert [outcome.outcome for outcome in reading.outcomes] == ["published"]


@in_virtual_time
async def test_cancelling_a_read_raises_at_once_and_settles_later() -> None:
    async with connected(automatic=False) as pair:
        held, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        (batch,) = pair.fabric.in_flight
        reading.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading.task
        assert reading.outcomes == []
        assert held.ends == []
        batch.succeed()  # the write lands in blocks that the import still owns
        await reading.settled.wait()
        assert [outcome.outcome for outcome in reading.outcomes] == ["cancelled"]
        await held.ended.wait()
        assert held.ends[0].detail == "cancelled"
        assert all_free(pair)


@in_virtual_time
async def test_a_cancelled_read_that_never_completes_is_fenced() -> None:
    async with connected(automatic=False) as pair:
        held, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        (batch,) = pair.fabric.in_flight
        reading.task.cancel()
        await reading.settled.wait()
        assert [outcome.outcome for outcome in reading.outcomes] == ["cancelled"]
        batch.move()  # nothing moves any more: the custody would see it
        await held.ended.wait()
        assert all_free(pair)


@in_virtual_time
async def test_a_release_during_the_read_cancels_it() -> None:
    async with connected(automatic=False) as pair:
        held, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        await pull.release("client gone")
        pair.fabric.in_flight[0].succeed()
        with pytest.raises(ImportFailed, match="CANCELLED"):
            await reading.task
        await held.ended.wait()


# What a read refuses


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"transfer_id": "another"}, "was offered to transfer"),
        ({"producer": EngineId(P.name, 99)}, "was offered to transfer"),
        ({"blocks": {"full": [0, 1, 99]}}, "the source names block 99 of group 'full', which has 16 blocks"),
        ({"blocks": {"full": [0, 1, 1]}}, "twice"),
        ({"blocks": {"full": [0, 1]}}, "the source names 2 blocks"),
        ({"blocks": {"window": [0, 1, 2]}}, "the source has ['window']"),
        ({"num_tokens": 0}, "for 0 tokens"),
    ],
)
@in_virtual_time
async def test_a_source_that_cannot_be_is_refused_and_released(changes: dict[str, Any], reason: str) -> None:
    async with connected() as pair:
        held, pull, source = pair.source(num_tokens=10)
        reading = Reading(pair.decode, pull, msgspec.structs.replace(source, **changes), num_blocks=3)
        failed = await failure(reading)
        assert failed.reason == Reason.PLAN_REFUSED
        assert reason in failed.detail
        await held.ended.wait()
        assert held.ends[0].detail == "failed"
        assert all_free(pair)


@in_virtual_time
async def test_a_pull_is_read_once() -> None:
    async with connected() as pair:
        _, pull, source = pair.source()
        await Reading(pair.decode, pull, source).task
        with pytest.raises(InvalidTransition, match="was read or released already"):
            await pull.read(source, {"full": [0, 1, 2]}, lambda outcome: pytest.fail("settled twice"))


@in_virtual_time
async def test_destination_blocks_have_one_owner() -> None:
    async with connected(automatic=False) as pair:
        _, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        held, other_pull, other_source = pair.source()
        with pytest.raises(InvalidTransition, match="still belongs to another import"):
            await other_pull.read(
                other_source, {"full": reading.blocks}, lambda outcome: pytest.fail("settled blocks of another import")
            )
        await held.ended.wait()
        pair.fabric.in_flight[0].succeed()
        await reading.task


# Leases


@in_virtual_time
async def test_sources_of_a_consumer_that_is_cut_off_are_free_within_the_lease() -> None:
    async with connected(automatic=False) as pair:
        held, pull, source = pair.source()
        computing = Held(pair.prefill, D, pair.decode.connector.begin(pair.link, new_transfer_id()).transfer_id)
        await asyncio.sleep(3 * LEASE_S)
        assert held.ends == []
        before = now()
        await pair.cable.cut()
        await asyncio.gather(held.ended.wait(), computing.ended.wait())
        assert now() - before <= LEASE_S + TICK_S
        assert [held.ends[0].outcome, computing.ends[0].outcome] == ["expired", "failed"]
        assert len(pair.prefill.pool.free) == 16
        failed = await failure(Reading(pair.decode, pull, source))
        assert failed.reason == Reason.SOURCE_EXPIRED


@in_virtual_time
async def test_a_read_that_finishes_after_the_lease_is_not_used() -> None:
    """The producer has given its blocks to somebody else by then; what was read is somebody else's."""
    async with connected(automatic=False, config=ConnectorConfig(import_timeout_s=1000.0)) as pair:
        held, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        await pair.cable.cut()
        await held.ended.wait()
        pair.fabric.in_flight[0].succeed()
        failed = await failure(reading)
        assert failed.reason == Reason.SOURCE_EXPIRED
        assert pair.decode.count("imports_failed_source_expired") == 1
        assert all_free(pair)


@in_virtual_time
async def test_the_consumer_gives_up_no_later_than_the_producer() -> None:
    async with connected(automatic=False, config=ConnectorConfig(import_timeout_s=1000.0)) as pair:
        held, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        await pair.cable.cut()
        importing = pair.decode.connector
        await until(lambda: bool(held.ends))
        pair.fabric.in_flight[0].succeed()
        await failure(reading)
        assert importing.stats().counters.get("imports_published", 0) == 0


@in_virtual_time
async def test_an_ack_that_was_lost_is_sent_again() -> None:
    async with connected() as pair:
        held, pull, source = pair.source()
        pair.cable.stall()
        await Reading(pair.decode, pull, source).task
        await asyncio.sleep(1.0)
        await pair.cable.cut()
        assert held.ends == []
        pair.cable.mend()
        before = now()
        await held.ended.wait()
        assert now() - before < 5.0  # by the ACK, not by the lease
        assert held.ends[0].outcome == "released"


@in_virtual_time
async def test_an_ack_whose_reply_was_lost_is_sent_again_and_changes_nothing() -> None:
    async with connected() as pair:
        held, pull, source = pair.source()
        await Reading(pair.decode, pull, source).task
        await held.ended.wait()
        await pair.cable.cut()
        pair.cable.mend()
        await until(lambda: pair.link.connected and not pair.link.ledger.unconfirmed)
        assert len(held.ends) == 1


@in_virtual_time
async def test_a_release_towards_a_lost_producer_is_bounded_and_raises_nothing() -> None:
    async with connected() as pair:
        _, pull, _ = pair.source()
        _, stalled, _ = pair.source()
        pair.cable.stall()
        before = now()
        await stalled.release("client gone")
        assert now() - before <= 10.0
        await pair.cable.cut()
        await until(lambda: not pair.link.connected)
        before = now()
        await pull.release("client gone")
        assert now() - before < 1.0


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
        failed = await failure(reading)
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
        failed = await failure(reading)
        assert failed.reason == Reason.TIMEOUT
        assert IMPORT_S <= now() - before <= IMPORT_S + TICK_S
        assert len(pair.decode.pool.free) == 16


@in_virtual_time
async def test_a_lost_completion_does_not_wedge_the_consumer() -> None:
    async with connected(automatic=False) as pair:
        _, pull, source = pair.source()
        reading = Reading(pair.decode, pull, source)
        await until(lambda: len(pair.fabric.in_flight) == 1)
        pair.fabric.in_flight[0].lose()
        assert (await failure(reading)).reason == Reason.TIMEOUT
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
        failed = await failure(reading)
        assert (failed.reason, failed.detail) == (Reason.TRANSFER_ERROR, "remote access error")
        await held.ended.wait()
        assert all_free(pair)


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
        assert (await failure(reading)).reason == Reason.PEER_LOST
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
        assert (await failure(reading)).reason == Reason.PEER_LOST
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
        assert all_free(pair)


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


# Starting and closing


@in_virtual_time
async def test_a_wrong_token_never_links() -> None:
    async with connected() as pair:
        stranger = Worker(EngineId("decode-1", 5), pair.fabric, token=b"another")
        await stranger.start()
        with pytest.raises(HandshakeError, match="does not know the cluster token"):
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
