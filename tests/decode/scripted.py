"""A decode worker's surroundings, scripted: a prefill worker, a connector and an engine that do as a test says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from types import SimpleNamespace
from typing import Any, Literal, cast

from connector import ConnectorConfig, DestinationRef, EngineId, Imported, ImportOutcome, InvalidTransition, SourceRef
from decode.config import DecodeConfig
from decode.request import Request
from decode.reservations import Reservations
from engine import EngineConfig, EngineError, EngineRequest, Failed, Token
from engine.blocks import BlockTable
from rpc.v1 import common_pb2, generate_pb2, prefill_pb2
from tests.block_pool import full_pool

DEADLINE_S = 20.0
PROMPT = [5, 6, 7]
FIRST = 9


class FakeEngine:
    """Real blocks; requests answer with `script` as soon as they are submitted."""

    def __init__(self) -> None:
        self.blocks = full_pool(4, 2)
        self.geometry = SimpleNamespace(groups=[SimpleNamespace(name="full")])
        self.max_model_len = 8
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
        self.reason = ""
        self.released: list[str] = []
        self.transfer_id = ""
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
        self.on_settled(ImportOutcome(transfer_id="t", outcome=outcome, reason=self.reason, detail=""))

    async def release(self, outcome: str) -> None:
        self.released.append(outcome)


class FakeReceive:
    """A WRITE that lands when the test settles it; a cancelled one settles only then, too."""

    def __init__(self) -> None:
        self.destination: DestinationRef | None = None
        self.refuses: Exception | None = None
        self.result: Imported | Exception | None = Imported(
            num_tokens=3, bytes=64, operations=0, seconds=0.5, transport="shm"
        )
        self.cancelled = False
        self.waiting = asyncio.Event()
        self.on_settled: Any = None

    def begin(
        self, link: object, transfer_id: str, blocks: dict[str, list[int]], num_tokens: int, on_settled: Any
    ) -> FakeReceive:
        if self.refuses is not None:
            raise self.refuses
        self.destination = DestinationRef(
            transfer_id=transfer_id, consumer=EngineId("decode-0", 1), blocks=blocks, num_tokens=num_tokens
        )
        self.on_settled = on_settled
        return self

    async def landed(self) -> Imported:
        self.waiting.set()
        if self.result is None:
            await asyncio.Event().wait()
        if isinstance(self.result, Exception):
            self.settle("failed")
            raise self.result
        self.settle("published")
        assert self.result is not None
        return self.result

    def cancel(self) -> None:
        self.cancelled = True

    def settle(self, outcome: Any) -> None:
        self.on_settled(ImportOutcome(transfer_id="t", outcome=outcome, reason="", detail=""))


class FakeCall:
    """A `Prefill` call: its events, then an error or a wait for ever."""

    def __init__(self, events: list[prefill_pb2.PrefillEvent], error: BaseException | None, hangs: bool) -> None:
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


def message(max_tokens: int = 3, stop: tuple[int, ...] = ()) -> generate_pb2.GenerateRequest:
    """What a gateway asks."""
    return generate_pb2.GenerateRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        max_tokens=max_tokens,
        stop_token_ids=stop,
        sampling=common_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
    )


class Made:
    """Everything around one request."""

    def __init__(
        self,
        *,
        max_tokens: int = 3,
        stop: tuple[int, ...] = (),
        mode: Literal["read", "write"] = "read",
        **limits: Any,
    ) -> None:
        self.engine = FakeEngine()
        self.pull = FakePull()
        self.receive = FakeReceive()
        self.num_tokens = len(PROMPT)
        self.error: BaseException | None = None
        self.hangs = False
        self.answers = True
        self.call: FakeCall | None = None
        self.asked: prefill_pb2.PrefillRequest | None = None
        self.chunks: list[generate_pb2.GenerateChunk] = []
        self.first_emitted = asyncio.Event()
        self.client_stalls_at: int | None = None
        self.peer = SimpleNamespace(
            engine_id=EngineId("prefill-0", 2), in_flight=0, link=object(), stub=SimpleNamespace(Prefill=self._prefill)
        )
        self.core: Any = SimpleNamespace(
            engine=self.engine,
            engine_id=EngineId("decode-0", 1),
            counters=Counter(),
            requests_ahead=0,
            info=SimpleNamespace(vocab_size=50),
            require_ready=lambda: None,
            connector=SimpleNamespace(begin=self._begin, receive=self.receive.begin),
        )
        self.peers: Any = SimpleNamespace(pick=lambda: self.peer)
        self.background: list[asyncio.Future[None]] = []
        self.config = DecodeConfig(
            name="decode-0",
            host="",
            model_path="",
            engine=EngineConfig(),
            connector=ConnectorConfig(mode=mode),
            token="t",
            **limits,
        )
        self.reservations = Reservations(self.engine)
        self.engine.blocks.on_freed(self.reservations.blocks_freed)
        self.request = Request(
            message(max_tokens, stop),
            cast(Any, self.core),
            self.config,
            cast(Any, self.peers),
            self.reservations,
            self._in_background,
        )

    def _prefill(self, message: prefill_pb2.PrefillRequest, timeout: float) -> FakeCall:
        self.asked = message
        source = prefill_pb2.SourceDescription(
            transfer_id=message.transfer_id,
            groups=[prefill_pb2.GroupBlocks(group="full", block_ids=[3, 1])],
            num_tokens=self.num_tokens,
        )
        prefilled = prefill_pb2.Prefilled(first_token_id=FIRST, first_token_logprob=-0.25, source=source)
        if message.HasField("destination"):
            prefilled.ClearField("source")
        events = [prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())]
        if self.answers:
            events.append(prefill_pb2.PrefillEvent(prefilled=prefilled))
        self.call = FakeCall(events, self.error, self.hangs)
        return self.call

    def _begin(self, link: object, transfer_id: str) -> FakePull:
        self.pull.transfer_id = transfer_id
        return self.pull

    def _in_background(self, work: Awaitable[None]) -> None:
        self.background.append(asyncio.ensure_future(work))

    async def emit(self, chunk: generate_pb2.GenerateChunk) -> None:
        self.chunks.append(chunk)
        self.first_emitted.set()
        if len(self.chunks) == self.client_stalls_at:
            await asyncio.Event().wait()

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
        assert self.core.requests_ahead == 0
        if self.receive.destination is None:
            assert self.pull.released, "the source was never released"
        assert self.call is None or self.call.cancelled
