"""One WRITE after the other, end to end: over real loopback connections and the scripted fabric, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from connector import (
    ConnectorConfig,
    DestinationRef,
    EngineId,
    InvalidTransition,
    PeerLostError,
    PlanError,
    Reason,
    new_transfer_id,
)
from tests.clock import in_virtual_time, now, until
from tests.connector.pair import Pair, connected
from tests.connector.pool import P
from tests.connector.writing import Pushing, Receiving, started

LEASE_S = ConnectorConfig().lease_s
TIMEOUT_S = ConnectorConfig().import_timeout_s
LAYERS = (0, 1, 2)


def in_flight(pair: Pair) -> int:
    return len(pair.fabric.in_flight)


def quarantined(pair: Pair) -> int:
    return pair.decode.connector.stats().blocks_quarantined


# The way it should go


@in_virtual_time
async def test_pages_arrive_layer_by_layer_and_the_commit_publishes_them() -> None:
    async with connected() as pair:
        receiving, pushing = started(pair, num_tokens=10, seed=7)
        for tokens in (3, 7, 10):
            for layer in LAYERS:
                pushing.compute(tokens, (layer,))
        assert receiving.outcomes == []
        pushing.finish()
        imported = await receiving.receive.landed()
        assert (imported.num_tokens, imported.transport) == (10, "fabric")
        assert imported.bytes == 3 * pair.decode.pool.block_bytes
        assert pair.decode.pool.holds(receiving.blocks, 7)
        await pushing.ended.wait()
        assert [end.outcome for end in pushing.ends] == ["flushed"]
        await until(lambda: pair.prefill.connector.sources.active == 0)
        assert pair.prefill.count("sources_released") == 1
        assert pair.decode.count("imports_published") == 1


@in_virtual_time
async def test_each_page_is_posted_once_and_as_soon_as_it_is_whole() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair, num_tokens=10)
        posted = []
        for tokens in (3, 4, 7, 9, 10):
            pushing.compute(tokens, (0,))
            posted.append(in_flight(pair))
        assert posted == [0, 1, 1, 2, 3]
        pushing.compute(layers=(1, 2))
        for batch in pair.fabric.in_flight:
            batch.succeed()
        pushing.finish()
        assert (await receiving.receive.landed()).bytes == pair.prefill.count("bytes_pushed")


@in_virtual_time
async def test_the_blocks_of_the_producer_are_free_when_all_has_arrived_not_when_it_is_acknowledged() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair)
        pushing.run()
        await asyncio.sleep(1.0)
        assert (pushing.ends, receiving.outcomes) == ([], [])
        for batch in pair.fabric.in_flight:
            batch.succeed()
        await receiving.receive.landed()
        await pushing.ended.wait()
        assert sorted(pair.prefill.pool.free) == list(range(16))


@in_virtual_time
async def test_only_the_missing_suffix_is_written() -> None:
    async with connected() as pair:
        receiving = Receiving(pair.decode, pair.link, num_tokens=14, local_blocks=2)
        pushing = Pushing(pair.prefill, receiving.destination, seed=5)
        pushing.run()
        imported = await receiving.receive.landed()
        assert (imported.num_tokens, imported.bytes) == (6, 2 * pair.decode.pool.block_bytes)
        pair.prefill.pool.fill(pushing.blocks, 5)
        for theirs, ours in zip(pushing.blocks[2:], receiving.blocks, strict=True):
            assert (pair.prefill.pool.block(theirs) == pair.decode.pool.block(ours)).all()


@in_virtual_time
async def test_many_at_once() -> None:
    async with connected() as pair:
        both = [started(pair, num_tokens=8, seed=seed) for seed in range(8)]
        for tokens in (4, 8):
            for layer in LAYERS:
                for _, pushing in both:
                    pushing.compute(tokens, (layer,))
        for _, pushing in both:
            pushing.finish()
        await asyncio.gather(*(receiving.receive.landed() for receiving, _ in both))
        assert all(pair.decode.pool.holds(receiving.blocks, seed) for seed, (receiving, _) in enumerate(both))


# Who gives up


@in_virtual_time
async def test_a_cancelled_write_keeps_its_blocks_until_the_producer_has_stopped() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair)
        pushing.compute(8)
        waiting = receiving.wait()
        await asyncio.sleep(0)
        waiting.cancel()
        await until(lambda: pushing.stops != [])
        assert (receiving.outcomes, quarantined(pair)) == ([], 3)
        pushing.compute(10)
        pushing.finish()
        assert in_flight(pair) == len(LAYERS)  # nothing was posted after the transfer had ended
        assert pair.prefill.count("pages_after_the_end") == len(LAYERS)
        for batch in pair.fabric.in_flight:
            batch.succeed()
        await receiving.settled.wait()
        assert [outcome.outcome for outcome in receiving.outcomes] == ["cancelled"]
        assert [end.outcome for end in pushing.ends] == ["failed"]
        assert (quarantined(pair), pair.all_free()) == (0, True)


@in_virtual_time
async def test_a_write_cancelled_before_it_began_is_stopped_at_once() -> None:
    async with connected() as pair:
        receiving = Receiving(pair.decode, pair.link)
        receiving.receive.cancel()
        await receiving.settled.wait()
        assert receiving.outcomes[0].outcome == "cancelled"
        with pytest.raises(InvalidTransition, match="given up by its consumer before it began"):
            Pushing(pair.prefill, receiving.destination)
        assert pair.all_free()


@in_virtual_time
async def test_a_producer_that_fails_says_so() -> None:
    async with connected() as pair:
        receiving, pushing = started(pair)
        pushing.compute(4)
        pair.prefill.connector.sources.fail(pushing.transfer_id, "out of memory")
        failed = await receiving.failure()
        assert (failed.reason, failed.detail) == (Reason.PRODUCER_FAILED, "out of memory")
        assert pair.all_free()


@in_virtual_time
async def test_an_operation_that_fails_fails_the_write_when_the_others_are_over() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair)
        pushing.compute()
        first, *others = pair.fabric.in_flight
        first.fail("cable pulled")
        await until(lambda: pushing.stops == ["cable pulled"])
        assert (pushing.ends, receiving.outcomes) == ([], [])
        for batch in others:
            batch.succeed()
        assert (await receiving.failure()).detail == "cable pulled"
        assert pair.all_free()


@in_virtual_time
async def test_a_prompt_that_is_finished_before_its_pages_fails() -> None:
    async with connected() as pair:
        receiving, pushing = started(pair)
        pushing.compute(10, (0, 1))
        pushing.finish()
        assert "before all of its pages" in (await receiving.failure()).detail


@in_virtual_time
async def test_a_write_that_takes_too_long_is_stopped_not_fenced() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair)
        pushing.compute()
        pushing.finish()
        waiting = receiving.wait()
        before = now()
        await until(lambda: pushing.stops != [])
        assert now() - before >= TIMEOUT_S
        assert (waiting.done(), quarantined(pair)) == (False, 3)
        for batch in pair.fabric.in_flight:
            batch.succeed()
        await receiving.settled.wait()
        assert receiving.outcomes[0].reason == Reason.TIMEOUT
        assert pair.decode.count("peers_fenced") == 0
        await asyncio.wait({waiting})


@in_virtual_time
async def test_a_slow_prefill_is_renewed_and_not_timed_out() -> None:
    async with connected() as pair:
        receiving, pushing = started(pair)
        await asyncio.sleep(20 * LEASE_S)
        pushing.run()
        await receiving.receive.landed()


# The network


@in_virtual_time
async def test_a_commit_that_is_lost_with_its_connection_is_said_again() -> None:
    async with connected() as pair:
        receiving, pushing = started(pair, seed=3)
        await pair.cable.cut()
        pushing.run()
        await pushing.ended.wait()
        assert receiving.outcomes == []
        pair.cable.mend()
        await receiving.receive.landed()
        assert pair.decode.pool.holds(receiving.blocks, 3)
        await until(lambda: pair.prefill.connector.sources.active == 0)


@in_virtual_time
async def test_a_cancel_that_is_lost_with_its_connection_is_said_again() -> None:
    async with connected() as pair:
        receiving, pushing = started(pair)
        pushing.compute(4)
        pair.cable.stall()
        receiving.receive.cancel()
        await asyncio.sleep(1.0)
        await pair.cable.cut()
        assert (pushing.stops, quarantined(pair)) == ([], 3)
        pair.cable.mend()
        await receiving.settled.wait()
        assert pair.all_free()


@in_virtual_time
async def test_a_producer_cut_off_stops_at_its_lease_and_the_consumer_keeps_its_blocks_until_it_hears() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair)
        pushing.compute(4)
        await pair.cable.cut()
        await until(lambda: pushing.stops != [])
        assert "has not renewed" in pushing.stops[0]
        pushing.compute(10)
        assert in_flight(pair) == len(LAYERS)
        for batch in pair.fabric.in_flight:
            batch.succeed()
        await pushing.ended.wait()
        assert receiving.outcomes == []
        pair.cable.mend()
        await receiving.settled.wait()
        assert receiving.outcomes[0].reason in (Reason.PRODUCER_FAILED, Reason.SOURCE_EXPIRED)
        assert pair.all_free()


# Death


@in_virtual_time
async def test_when_the_producer_dies_its_writes_are_over() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair)
        pushing.compute(8)
        pair.fabric.kill(pair.prefill.end)
        failed = await receiving.failure()
        assert failed.reason == Reason.PEER_LOST
        assert in_flight(pair) == 0


@in_virtual_time
async def test_when_the_consumer_dies_the_producers_blocks_come_back() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair)
        pushing.compute(8)
        pair.fabric.kill(pair.decode.end)
        await pushing.ended.wait()
        assert [end.outcome for end in pushing.ends] == ["failed"]
        assert "killed by the script" in pushing.stops[0]
        receiving.receive.cancel()
        await receiving.settled.wait()


@in_virtual_time
async def test_dropping_a_peer_waits_for_its_writes_to_stop() -> None:
    async with connected() as pair:
        receiving, pushing = started(pair)
        pushing.compute(4)
        await pair.decode.connector.disconnect(P.name)
        assert receiving.outcomes[0].outcome == "cancelled"
        await pushing.ended.wait()
        assert pair.all_free()


@in_virtual_time
async def test_blocks_of_a_dropped_peer_that_does_not_answer_wait_for_its_end() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair)
        pushing.compute(4)
        await pair.decode.connector.disconnect(P.name)
        assert (receiving.outcomes, quarantined(pair)) == ([], 3)
        pair.fabric.kill(pair.prefill.end)
        await receiving.settled.wait()
        for batch in pair.fabric.in_flight:
            batch.fail()


@in_virtual_time
async def test_a_peer_known_to_have_ended_need_not_answer() -> None:
    async with connected(automatic=False) as pair:
        receiving, pushing = started(pair)
        pushing.compute(4)
        await pair.cable.cut()
        await pair.decode.connector.disconnect(P.name, process_ended=True)
        assert receiving.outcomes[0].reason == Reason.PEER_LOST
        for batch in pair.fabric.in_flight:
            batch.fail()


# Bad input


def blocks(named: dict[str, list[int]]) -> Callable[[DestinationRef], DestinationRef]:
    return lambda ref: msgspec.structs.replace(ref, blocks=named)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda ref: msgspec.structs.replace(ref, blocks={"full": [0, 1, 99]}),
            "block 99 of group 'full', which has 16",
        ),
        (
            lambda ref: msgspec.structs.replace(ref, blocks={"full": [0, 1]}),
            "names 2 blocks of group 'full' for tokens",
        ),
        (blocks({"full": [0, 1, 1]}), "twice"),
        (blocks({"window": [0]}), "its pool has \\['full'\\]"),
        (lambda ref: msgspec.structs.replace(ref, num_tokens=0), "0 of 0 tokens"),
        (lambda ref: msgspec.structs.replace(ref, local_tokens=3), "has 3 of 10 tokens"),
    ],
)
@in_virtual_time
async def test_a_destination_that_cannot_be_is_refused(change: Callable[..., object], message: str) -> None:
    async with connected() as pair:
        receiving = Receiving(pair.decode, pair.link)
        bad = change(receiving.destination)
        with pytest.raises(PlanError, match=message):
            Pushing(pair.prefill, bad)  # type: ignore[arg-type]
        receiving.receive.cancel()
        await receiving.settled.wait()
        assert pair.all_free()


@in_virtual_time
async def test_a_consumer_that_is_not_connected_is_refused() -> None:
    async with connected() as pair:
        receiving = Receiving(pair.decode, pair.link)
        stranger = msgspec.structs.replace(receiving.destination, consumer=EngineId("decode-9", 1))
        with pytest.raises(PeerLostError, match="has no control connection"):
            Pushing(pair.prefill, stranger)
        receiving.receive.cancel()
        await receiving.settled.wait()


@in_virtual_time
async def test_a_block_has_one_owner() -> None:
    async with connected() as pair:
        receiving = Receiving(pair.decode, pair.link)
        with pytest.raises(InvalidTransition, match="still belongs to another import"):
            pair.decode.connector.receive(
                pair.link, new_transfer_id(), {"full": receiving.blocks}, 10, lambda outcome: None
            )
        receiving.receive.cancel()
        await receiving.settled.wait()
