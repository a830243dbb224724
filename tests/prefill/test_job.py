"""Who owns a prompt's blocks, whatever happens in whatever order."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from connector import EngineId, InvalidTransition, PlanError, Sources, build_geometry
from connector.pages import GroupSpec, PoolGeometry
from engine import EngineRequest, Failed, SamplingParams, Token
from engine.blocks import BlockPool
from prefill.job import Job, PrefillFailed

GROUP = GroupSpec(name="full", layers=(0,), num_kv_heads=1, key_dim=2, value_dim=2, itemsize=4)
CONSUMER = EngineId("decode-0", 1)
PRODUCER = EngineId("prefill-0", 2)
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 6, 7]


class FakeEngine:
    """Holds submitted requests until the test says what becomes of them. Blocks are real."""

    def __init__(self) -> None:
        self.blocks = BlockPool(4, 2)
        self.geometry: PoolGeometry = build_geometry(GROUP, layout="BLHNC", block_size=2, num_blocks=4)
        self.submitted: dict[str, EngineRequest] = {}
        self.calls: Counter[str] = Counter()

    def submit(self, request: EngineRequest) -> None:
        request.table = self.blocks.allocate(request.request_id, len(request.prompt_token_ids))
        self.submitted[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self.calls["abort"] += 1
        request = self.submitted.pop(request_id, None)
        if request is not None:
            assert request.table is not None
            self.blocks.free(request.table)

    def free(self, table: object) -> None:
        self.calls["free"] += 1
        self.blocks.free(table)  # type: ignore[arg-type]

    def finish(self, request_id: str) -> None:
        """The first token has been drawn: the blocks are the caller's from here on."""
        request = self.submitted.pop(request_id)
        request.sink(Token(token_id=9, logprob=-0.5, position=3, finish="length", prompt_tokens_computed=3))

    def fail(self, request_id: str) -> None:
        request = self.submitted.pop(request_id)
        assert request.table is not None
        self.blocks.free(request.table)
        request.table = None
        request.sink(Failed(message="a step failed"))


class Made:
    """A job on a real source table with a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine = FakeEngine()
        self.sources = Sources(PRODUCER, self.engine.geometry, 30.0, lambda: self.now)
        self.job = Job(self.engine, self.sources, "t")  # type: ignore[arg-type]
        self.sources.open("t", CONSUMER, self.job.ended)

    @property
    def num_free(self) -> int:
        self.engine.blocks.validate()
        return self.engine.blocks.num_free

    def ack(self) -> None:
        self.sources.ack("t", CONSUMER, 0, 1, "published")


async def callbacks() -> None:
    """Let what was called from the engine's thread run."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_first_token_comes_with_a_held_source_that_the_ack_frees() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.finish("t")
    prefilled = await made.job.done
    assert prefilled.token.token_id == 9
    assert prefilled.source.num_tokens == 3
    assert prefilled.source.blocks == {"full": [0, 1]}
    assert (made.sources.held, made.num_free) == (1, 2)
    made.job.cancel("the call has ended")  # as every call does
    assert (made.sources.held, made.num_free) == (1, 2)
    made.ack()
    assert (made.sources.held, made.num_free) == (0, 4)


async def test_a_call_cancelled_while_computing_aborts_and_frees() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.job.cancel("the client left")
    assert made.engine.calls["abort"] == 1
    assert (made.sources.active, made.num_free) == (0, 4)
    with pytest.raises(PrefillFailed, match="the client left"):
        await made.job.done


async def test_a_call_cancelled_between_the_last_step_and_the_hold_frees() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.finish("t")  # its callback waits on the loop
    made.job.cancel("the client left")
    assert made.num_free == 2
    await callbacks()
    assert (made.sources.active, made.num_free) == (0, 4)


async def test_a_lease_that_ends_while_computing_aborts() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.now = 31.0
    made.sources.reap()
    assert (made.engine.calls["abort"], made.num_free) == (1, 4)
    with pytest.raises(PrefillFailed):
        await made.job.done
    made.job.cancel("the call has ended")


async def test_a_lease_that_ends_while_held_frees() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.finish("t")
    await made.job.done
    made.now = 31.0
    made.sources.reap()
    assert (made.sources.held, made.num_free, made.engine.calls["free"]) == (0, 4, 1)


async def test_an_ack_before_the_first_token_ends_the_computation() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.ack()
    assert (made.sources.active, made.num_free) == (0, 4)
    made.job.cancel("the call has ended")


async def test_an_ack_between_the_last_step_and_the_hold_frees() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.finish("t")
    made.ack()
    await callbacks()
    assert (made.sources.active, made.num_free) == (0, 4)


async def test_a_failed_step_fails_the_source() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.fail("t")
    with pytest.raises(PrefillFailed, match="a step failed"):
        await made.job.done
    assert (made.sources.active, made.num_free) == (0, 4)


async def test_a_hold_that_is_refused_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)

    def refuse(*_: object) -> None:
        raise PlanError("these blocks are no source")

    monkeypatch.setattr(made.sources, "hold", refuse)
    made.engine.finish("t")
    with pytest.raises(PrefillFailed, match="these blocks are no source"):
        await made.job.done
    assert (made.sources.active, made.num_free) == (0, 4)


async def test_a_transfer_id_is_never_used_twice() -> None:
    made = Made()
    with pytest.raises(InvalidTransition):
        made.sources.open("t", CONSUMER, made.job.ended)
