"""One request against a scripted prefill worker, connector and engine: what it tells, and that it leaves nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from connector import EngineId, Imported, ImportFailed, ImportOutcome, InvalidTransition, PeerLostError, SourceRef
from decode.config import DecodeConfig
from decode.request import Request
from decode.reservations import Reservations
from engine import EngineConfig, EngineError, EngineRequest, Failed, Token
from engine.blocks import BlockPool, BlockTable
from rpc.errors import CallRefused
from rpc.v1 import common_pb2, generate_pb2, prefill_pb2

DEADLINE_S = 20.0
PROMPT = [5, 6, 7]
FIRST = 9


class FakeEngine:
    """Real blocks; requests answer with `script` as soon as they are submitted."""

    def __init__(self) -> None:
        self.blocks = BlockPool(4, 2)
        self.geometry = SimpleNamespace(groups=[SimpleNamespace(name="full")])
        self.script: list[tuple[int, str | None]] = [(11, None), (12, "length")]
        self.refuses: EngineError | None = None
        self.fails = False
        self.submitted: dict[str, EngineRequest] = {}

    def reserve(self, owner: str, num_tokens: int) -> BlockTable | None:
        return self.blocks.allocate(owner, num_tokens)

    def free(self, table: BlockTable) -> None:
        self.blocks.free(table)

    def submit(self, request: EngineRequest) -> None:
        assert request.table is not None
        if self.refuses is not None:
            self.blocks.free(request.table)
            raise self.refuses
        self.submitted[request.request_id] = request
        for place, (token, finish) in enumerate(self.script):
            request.sink(
                Token(token_id=token, logprob=-1.0, position=4 + place, finish=finish, prompt_tokens_computed=0)  # type: ignore[arg-type]
            )
            if finish is not None:
                self.abort(request.request_id)
        if self.fails:
            self.abort(request.request_id)
            request.sink(Failed(message="a step failed"))

    def abort(self, request_id: str) -> None:
        request = self.submitted.pop(request_id, None)
        if request is not None:
            assert request.table is not None
            self.blocks.free(request.table)


class FakePull:
    """Answers a read with `result`, or waits until it is settled by hand."""

    def __init__(self) -> None:
        self.result: Imported | Exception | None = Imported(
            num_tokens=3, bytes=64, operations=1, seconds=0.5, transport="shm"
        )
        self.reads: list[tuple[SourceRef, dict[str, list[int]]]] = []
        self.released: list[str] = []
        self.reading = asyncio.Event()
        self.on_settled: Any = None

    async def read(self, source: SourceRef, destination: dict[str, list[int]], on_settled: Any) -> Imported:
        self.reads.append((source, destination))
        self.on_settled = on_settled
        self.reading.set()
        if self.result is None:
            await asyncio.Event().wait()
        if isinstance(self.result, InvalidTransition):
            raise self.result
        if isinstance(self.result, Exception):
            self.settle("failed")
            raise self.result
        self.settle("published")
        assert self.result is not None
        return self.result

    def settle(self, outcome: Any) -> None:
        self.on_settled(ImportOutcome(transfer_id="t", outcome=outcome, reason="", detail=""))

    async def release(self, outcome: str) -> None:
        self.released.append(outcome)


class FakeCall:
    """A `Prefill` call: its events, then an error or a wait for ever."""

    def __init__(self, events: list[prefill_pb2.PrefillEvent], error: Exception | None, hangs: bool) -> None:
        self._events, self._error, self._hangs = events, error, hangs
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        for event in self._events:
            yield event
        if self._error is not None:
            raise self._error
        if self._hangs:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancelled = True


class Made:
    """Everything around one request."""

    def __init__(self, *, max_tokens: int = 3, stop: tuple[int, ...] = (), **limits: Any) -> None:
        self.engine = FakeEngine()
        self.pull = FakePull()
        self.num_tokens = len(PROMPT)
        self.error: Exception | None = None
        self.hangs = False
        self.answers = True
        self.call: FakeCall | None = None
        self.chunks: list[generate_pb2.GenerateChunk] = []
        self.first_emitted = asyncio.Event()
        self.peer = SimpleNamespace(
            engine_id=EngineId("prefill-0", 2), in_flight=0, link=object(), stub=SimpleNamespace(Prefill=self._prefill)
        )
        self.core: Any = SimpleNamespace(
            engine=self.engine,
            engine_id=EngineId("decode-0", 1),
            counters=Counter(),
            connector=SimpleNamespace(begin=lambda link, transfer_id: self.pull),
        )
        self.peers: Any = SimpleNamespace(pick=lambda: self.peer)
        self.background: list[asyncio.Future[None]] = []
        config = DecodeConfig(
            name="decode-0",
            host="",
            model_path="",
            engine=EngineConfig(),
            connector=None,  # type: ignore[arg-type]  # not looked at here
            token="t",
            **limits,
        )
        self.request = Request(
            generate_pb2.GenerateRequest(
                request_id="r",
                prompt_token_ids=PROMPT,
                max_tokens=max_tokens,
                stop_token_ids=stop,
                sampling=common_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
            ),
            cast(Any, self.core),
            config,
            cast(Any, self.peers),
            Reservations(self.engine),
            self._in_background,
        )

    def _prefill(self, message: prefill_pb2.PrefillRequest, timeout: float) -> FakeCall:
        source = prefill_pb2.SourceDescription(
            transfer_id=message.transfer_id,
            groups=[prefill_pb2.GroupBlocks(group="full", block_ids=[3, 1])],
            num_tokens=self.num_tokens,
        )
        prefilled = prefill_pb2.Prefilled(first_token_id=FIRST, first_token_logprob=-0.25, source=source)
        events = [prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())]
        if self.answers:
            events.append(prefill_pb2.PrefillEvent(prefilled=prefilled))
        self.call = FakeCall(events, self.error, self.hangs)
        return self.call

    def _in_background(self, work: Awaitable[None]) -> None:
        self.background.append(asyncio.ensure_future(work))

    async def emit(self, chunk: generate_pb2.GenerateChunk) -> None:
        self.chunks.append(chunk)
        self.first_emitted.set()

    async def run(self) -> list[int]:
        async with asyncio.timeout(DEADLINE_S):
            await self.request.run(self.emit)
        return [token for chunk in self.chunks for token in chunk.token_ids]

    async def check_nothing_is_left(self) -> None:
        await asyncio.gather(*self.background)
        self.engine.blocks.validate()
        assert self.engine.blocks.num_free == 4
        assert self.engine.submitted == {}
        assert self.peer.in_flight == 0
        assert self.pull.released, "the source was never released"
        assert self.call is None or self.call.cancelled


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
