"""Who owns a prompt's blocks, whatever happens in whatever order."""

from __future__ import annotations

import asyncio

import pytest

from connector import InvalidTransition, PlanError, Sources
from engine import SamplingParams
from prefill.job import GivenUp, Job, PrefillFailed
from tests.prefill.scripted import CONSUMER, PRODUCER, PROMPT, FakeEngine

GREEDY = SamplingParams(temperature=0.0)


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
    with pytest.raises(GivenUp):
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


async def test_an_ack_before_the_prompt_was_submitted_leaves_nothing_to_compute() -> None:
    made = Made()
    made.ack()
    with pytest.raises(GivenUp):
        made.job.submit(PROMPT, GREEDY)
    assert made.engine.submitted == {}
    assert (made.sources.active, made.num_free) == (0, 4)
    made.job.cancel("the call has ended")


async def test_a_call_cancelled_before_the_prompt_was_submitted_ends_the_source() -> None:
    made = Made()
    made.job.cancel("the client left")
    assert (made.sources.active, made.num_free) == (0, 4)


async def test_a_call_cancelled_in_the_moment_of_the_hold_leaves_a_source_that_the_ack_frees() -> None:
    """The waiting task is cancelled, but has not run yet, when the blocks are taken."""
    made = Made()
    made.job.submit(PROMPT, GREEDY)

    async def call() -> None:
        try:
            await made.job.done
        finally:
            made.job.cancel("the client left")

    task = asyncio.create_task(call())
    await callbacks()
    made.engine.finish("t")  # its callback stands before the cancellation on the loop
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert (made.sources.held, made.num_free) == (1, 2)
    made.ack()
    assert (made.sources.active, made.num_free) == (0, 4)


async def test_a_connector_that_closes_frees_what_is_held_and_aborts_what_is_computed() -> None:
    held, computed = Made(), Made()
    for made in (held, computed):
        made.job.submit(PROMPT, GREEDY)
    held.engine.finish("t")
    await held.job.done
    for made in (held, computed):
        made.sources.close()
        assert (made.sources.active, made.num_free) == (0, 4)
    assert computed.engine.calls["abort"] == 1
    with pytest.raises(PrefillFailed):
        await computed.job.done


async def test_a_failed_step_fails_the_source() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.fail("t")
    with pytest.raises(PrefillFailed, match="a step failed") as error:
        await made.job.done
    assert not isinstance(error.value, GivenUp)
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
