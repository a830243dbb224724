"""A request whose pages are written: whose are the blocks, whatever ends it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from connector import ImportFailed, PeerLostError
from rpc.errors import CallRefused
from tests.decode.scripted import FIRST, PROMPT, Made


async def test_blocks_travel_with_the_call_and_the_pages_are_decoded() -> None:
    made = Made(mode="write")
    assert await made.run() == [FIRST, 11, 12]
    assert made.asked is not None
    destination = made.asked.destination
    assert (destination.num_tokens, destination.local_tokens) == (len(PROMPT), 0)
    assert [(group.group, len(group.block_ids)) for group in destination.groups] == [("full", 2)]
    assert made.chunks[-1].stats.prompt_tokens_imported == 3
    assert made.core.counters["transfers_published"] == 1
    assert not made.receive.cancelled
    await made.check_nothing_is_left()


async def test_an_answer_of_one_token_asks_for_no_page() -> None:
    made = Made(mode="write", max_tokens=1)
    assert await made.run() == [FIRST]
    assert made.asked is not None
    assert not made.asked.HasField("destination")
    await made.check_nothing_is_left()


async def test_without_blocks_nothing_is_asked() -> None:
    made = Made(mode="write", reserve_timeout_s=0.0)
    table = made.engine.reserve("another", 8)
    assert table is not None
    with pytest.raises(CallRefused) as refused:
        await made.run()
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert made.asked is None
    made.engine.free(table)


async def test_a_peer_that_is_lost_before_the_call_costs_no_block() -> None:
    made = Made(mode="write")
    made.receive.refuses = PeerLostError("it is gone")
    with pytest.raises(CallRefused) as refused:
        await made.run()
    assert (refused.value.code, made.engine.blocks.num_free) == (grpc.StatusCode.UNAVAILABLE, 4)


async def test_pages_that_do_not_come_fail_the_request() -> None:
    made = Made(mode="write")
    made.receive.result = ImportFailed("PRODUCER_FAILED", "out of memory")
    with pytest.raises(CallRefused, match="the pages did not arrive"):
        await made.run()
    await made.check_nothing_is_left()


async def left_over(made: Made) -> None:
    """The blocks are the producer's to write until the import has settled."""
    await asyncio.gather(*made.background)
    assert made.receive.cancelled
    assert made.engine.blocks.num_free == 2
    made.receive.settle("cancelled")
    await made.check_nothing_is_left()


async def test_an_answer_that_ends_with_its_first_token_stops_the_write() -> None:
    made = Made(mode="write", stop=(FIRST,))
    assert await made.run() == [FIRST]
    await left_over(made)


async def test_a_failed_prefill_call_stops_the_write() -> None:
    made = Made(mode="write")
    made.answers = False
    with pytest.raises(CallRefused, match="ended without an answer"):
        await made.run()
    await left_over(made)


async def test_a_client_that_leaves_during_prefill_stops_the_write() -> None:
    made = Made(mode="write")
    made.answers, made.hangs = False, True
    task = asyncio.create_task(made.run())
    while made.call is None:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await left_over(made)


async def test_a_client_that_leaves_while_pages_land_stops_the_write() -> None:
    made = Made(mode="write")
    made.receive.result = None
    task = asyncio.create_task(made.run())
    await made.receive.waiting.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await left_over(made)


async def test_pages_that_land_in_the_moment_of_the_cancellation_are_freed() -> None:
    made = Made(mode="write")
    made.receive.result = None
    task = asyncio.create_task(made.run())
    await made.receive.waiting.wait()
    task.cancel()
    made.receive.settle("published")
    await asyncio.gather(task, return_exceptions=True)
    await made.check_nothing_is_left()
