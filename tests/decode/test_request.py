"""One request against a scripted prefill worker, connector and engine: what it tells, and that it leaves nothing."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from connector import ImportFailed, InvalidTransition, PeerLostError
from engine import EngineError
from rpc.errors import CallRefused
from rpc.v1 import common_pb2
from tests.decode.scripted import DEADLINE_S, FIRST, Made


async def refused(made: Made) -> CallRefused:
    with pytest.raises(CallRefused) as error:
        await made.run()
    await made.check_nothing_is_left()
    return error.value


async def test_tokens_come_from_prefill_and_then_from_decode() -> None:
    made = Made()
    assert await made.run() == [FIRST, 11, 12]
    ((source, destination),) = made.pull.reads
    assert source.blocks == {"full": [3, 1]}
    assert len(destination["full"]) == 2
    last = made.chunks[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert (last.stats.prompt_tokens, last.stats.prompt_tokens_imported, last.stats.imported_bytes) == (3, 3, 64)
    assert [chunk.finish_reason for chunk in made.chunks[:-1]] == [common_pb2.FINISH_REASON_UNSPECIFIED] * (
        len(made.chunks) - 1
    )
    await made.check_nothing_is_left()


async def test_the_client_has_the_first_token_before_any_page_moves() -> None:
    made = Made()
    made.pull.result = None
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(DEADLINE_S):
        await made.first_emitted.wait()
        assert list(made.chunks[0].token_ids) == [FIRST]
        await made.pull.reading.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert made.engine.blocks.num_free == 2, "blocks are the import's until it has settled"
    made.pull.settle("cancelled")
    await made.check_nothing_is_left()


async def test_an_import_that_lands_after_its_request_was_cancelled_is_freed() -> None:
    made = Made()
    made.pull.result = None
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(DEADLINE_S):
        await made.pull.reading.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    made.pull.settle("published")
    await made.check_nothing_is_left()


@pytest.mark.parametrize(
    ("max_tokens", "stop", "finish"),
    [(1, (), common_pb2.FINISH_REASON_LENGTH), (3, (FIRST,), common_pb2.FINISH_REASON_STOP)],
)
async def test_an_answer_that_ends_with_its_first_token_moves_no_page(
    max_tokens: int, stop: tuple[int, ...], finish: common_pb2.FinishReason.ValueType
) -> None:
    made = Made(max_tokens=max_tokens, stop=stop)
    assert await made.run() == [FIRST]
    assert made.chunks[0].finish_reason == finish
    assert made.pull.reads == []
    await made.check_nothing_is_left()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
        (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_failing_prefill_ends_the_request(code: grpc.StatusCode, told: grpc.StatusCode) -> None:
    made = Made()
    made.answers = False
    nothing = grpc.aio.Metadata()
    made.error = grpc.aio.AioRpcError(code, nothing, nothing, details="because", debug_error_string="")
    error = await refused(made)
    assert error.code is told
    assert "because" in str(error)
    assert made.chunks == []


async def test_a_prefill_that_ends_without_an_answer_is_a_failed_leg() -> None:
    made = Made()
    made.answers = False
    assert (await refused(made)).code is grpc.StatusCode.UNAVAILABLE


async def test_pages_of_another_number_of_tokens_are_not_used() -> None:
    made = Made()
    made.num_tokens = 2
    assert (await refused(made)).code is grpc.StatusCode.UNAVAILABLE
    assert made.pull.reads == []


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (ImportFailed("SOURCE_EXPIRED", "too late"), grpc.StatusCode.UNAVAILABLE),
        (InvalidTransition("a mistake of ours"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_pages_that_do_not_arrive_end_the_request_with_an_error(result: Exception, code: grpc.StatusCode) -> None:
    made = Made()
    made.pull.result = result
    assert (await refused(made)).code is code
    assert [list(chunk.token_ids) for chunk in made.chunks] == [[FIRST]]


async def test_a_full_pool_ends_the_request_after_its_deadline() -> None:
    made = Made(reserve_timeout_s=0.0)
    taken = made.engine.blocks.allocate("somebody else", 8)
    assert taken is not None
    with pytest.raises(CallRefused) as error:
        await made.run()
    assert error.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    made.engine.free(taken)
    await made.check_nothing_is_left()


async def test_an_engine_that_refuses_or_fails_ends_the_request() -> None:
    made = Made()
    made.engine.refuses = EngineError("no")
    assert (await refused(made)).code is grpc.StatusCode.INTERNAL
    made = Made()
    made.engine.script, made.engine.fails = [(11, None)], True
    error = await refused(made)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "a step failed" in str(error)


async def test_a_client_that_leaves_while_decoding_leaves_nothing() -> None:
    made = Made()
    made.engine.script = [(11, None)]
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(DEADLINE_S):
        while len(made.chunks) < 2:
            made.first_emitted.clear()
            await made.first_emitted.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await made.check_nothing_is_left()


async def test_a_client_that_leaves_during_prefill_leaves_nothing() -> None:
    made = Made()
    made.answers, made.hangs = False, True
    task = asyncio.create_task(made.run())
    while made.call is None:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await made.check_nothing_is_left()


async def test_a_prefill_call_that_somebody_else_cancels_is_a_failed_leg() -> None:
    """As a call is told when its channel is closed under it. The request is not cancelled, so it has to end with a
    status: a handler that lets this error through sends none, and its client waits until its deadline."""
    made = Made()
    made.answers = False
    made.error = asyncio.CancelledError()
    error = await refused(made)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "was dropped" in str(error)


@pytest.mark.parametrize("stalled_at", [1, 2])
async def test_a_client_that_leaves_while_it_takes_no_data_leaves_nothing(stalled_at: int) -> None:
    made = Made()
    made.engine.script = [(11, None)]
    made.client_stalls_at = stalled_at
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(DEADLINE_S):
        while len(made.chunks) < stalled_at:
            made.first_emitted.clear()
            await made.first_emitted.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    await made.check_nothing_is_left()


async def test_a_client_that_leaves_while_waiting_for_blocks_leaves_the_queue() -> None:
    made = Made()
    taken = made.engine.blocks.allocate("somebody else", 8)
    assert taken is not None
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(DEADLINE_S):
        await made.first_emitted.wait()
    assert made.core.requests_ahead == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    made.engine.free(taken)
    assert (await made.reservations.reserve("next", 8, DEADLINE_S)).owner == "next", (
        "somebody still stands in the queue"
    )
    assert made.pull.reads == []
    assert made.pull.released


async def test_a_request_waits_for_blocks_and_goes_on_when_they_come() -> None:
    made = Made()
    taken = made.engine.blocks.allocate("somebody else", 8)
    assert taken is not None
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(DEADLINE_S):
        await made.first_emitted.wait()
        made.engine.free(taken)
        assert await task == [FIRST, 11, 12]
    await made.check_nothing_is_left()


async def test_requests_of_one_id_do_not_share_a_place_in_the_queue() -> None:
    """Whose blocks are whose must not depend on what gateways call their requests."""
    made, other = Made(), Made()
    assert made.request.transfer_id != other.request.transfer_id
    owners: list[str] = []
    reserve = made.engine.reserve

    def note(owner: str, num_tokens: int) -> object:
        owners.append(owner)
        return reserve(owner, num_tokens)

    made.engine.reserve = note  # type: ignore[method-assign, assignment]
    await made.run()
    assert owners == [made.request.transfer_id]


async def test_transfers_are_counted_once_by_outcome_and_reason() -> None:
    made = Made()
    await made.run()
    assert {"transfers_published": 1, "tokens_imported": 3}.items() <= made.core.counters.items()

    made = Made()
    made.pull.result = ImportFailed("SOURCE_EXPIRED", "too late")
    made.pull.reason = "SOURCE_EXPIRED"
    await refused(made)
    assert made.core.counters == {"transfers_failed": 1, "transfers_failed_source_expired": 1}

    made = Made()
    made.pull.result = None
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(DEADLINE_S):
        await made.pull.reading.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    made.pull.settle("cancelled")
    assert made.core.counters == {"transfers_cancelled": 1}


async def test_without_a_prefill_worker_nothing_is_begun() -> None:
    made = Made()
    made.peers.pick = lambda: None
    with pytest.raises(CallRefused) as error:
        await made.run()
    assert error.value.code is grpc.StatusCode.UNAVAILABLE

    made = Made()

    def gone(link: object, transfer_id: str) -> None:
        raise PeerLostError("it is gone")

    made.core.connector.begin = gone
    with pytest.raises(CallRefused, match="it is gone"):
        await made.run()
    assert made.peer.in_flight == 0
