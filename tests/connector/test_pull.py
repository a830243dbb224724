"""One transfer after the other, end to end: over real loopback connections and the scripted fabric, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from connector import (
    ConnectorConfig,
    EngineId,
    ImportFailed,
    InvalidTransition,
    Reason,
    new_transfer_id,
)
from connector.connector import TICK_S
from tests.clock import in_virtual_time, now, until
from tests.connector.pair import Held, Reading, connected
from tests.connector.pool import D, P

LEASE_S = ConnectorConfig().lease_s


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
        assert pair.all_free()


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
        assert pair.all_free()


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
        ({"num_tokens": 0}, "0 of 0 tokens"),
    ],
)
@in_virtual_time
async def test_a_source_that_cannot_be_is_refused_and_released(changes: dict[str, Any], reason: str) -> None:
    async with connected() as pair:
        held, pull, source = pair.source(num_tokens=10)
        reading = Reading(pair.decode, pull, msgspec.structs.replace(source, **changes), num_blocks=3)
        failed = await reading.failure()
        assert failed.reason == Reason.PLAN_REFUSED
        assert reason in failed.detail
        await held.ended.wait()
        assert held.ends[0].detail == "failed"
        assert pair.all_free()


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
        failed = await Reading(pair.decode, pull, source).failure()
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
        failed = await reading.failure()
        assert failed.reason == Reason.SOURCE_EXPIRED
        assert pair.decode.count("imports_failed_source_expired") == 1
        assert pair.all_free()


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
        await reading.failure()
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
