"""Who owns a prompt's blocks while they are written, whatever happens in whatever order."""

from __future__ import annotations

import asyncio

import pytest

from connector import ConnectorError, DestinationRef, PeerLostError, PlanError, SourceEnd
from engine import SamplingParams
from prefill.job import GivenUp, PrefillFailed
from prefill.write_job import WriteJob
from tests.prefill.scripted import CONSUMER, PROMPT, FakeEngine

GREEDY = SamplingParams(temperature=0.0)
DESTINATION = DestinationRef(transfer_id="t", consumer=CONSUMER, blocks={"full": [2, 3]}, num_tokens=3)


class FakeSources:
    """Notes what is computed; the test says when a transfer stops and ends."""

    def __init__(self) -> None:
        self.refuses: ConnectorError | None = None
        self.computed_to: list[tuple[int, int, list[int]]] = []
        self.finished = False
        self.failed: list[str] = []

    def open_write(self, destination: DestinationRef, on_end: object, on_stop: object) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.on_end, self.on_stop = on_end, on_stop

    def computed(self, transfer_id: str, blocks: dict[str, list[int]], layer: int, num_tokens: int) -> None:
        self.computed_to.append((layer, num_tokens, blocks["full"]))

    def finish(self, transfer_id: str) -> None:
        self.finished = True

    def fail(self, transfer_id: str, detail: str) -> None:
        self.failed.append(detail)
        self.end("failed", detail)

    def stop(self) -> None:
        self.on_stop("cancelled")  # type: ignore[operator]

    def end(self, outcome: str, detail: str = "") -> None:
        self.on_end(SourceEnd(transfer_id="t", outcome=outcome, detail=detail))  # type: ignore[operator, arg-type]


class Made:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.sources = FakeSources()
        self.job = WriteJob(self.engine, self.sources, DESTINATION)  # type: ignore[arg-type]

    @property
    def num_free(self) -> int:
        self.engine.blocks.validate()
        return self.engine.blocks.num_free


async def callbacks() -> None:
    """Let what was called from the engine's thread run."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_first_token_comes_at_once_and_the_blocks_when_nothing_is_in_flight() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.compute("t", 2)
    made.engine.compute("t", 3)
    made.engine.finish("t")
    token = await made.job.done
    assert token.token_id == 9
    assert made.sources.computed_to == [(0, 2, [0, 1]), (0, 3, [0, 1])]
    assert made.sources.finished
    made.job.cancel("the call has ended")  # as every call does
    assert (made.sources.failed, made.num_free) == ([], 2)
    made.sources.end("flushed")
    assert made.num_free == 4


async def test_a_stopped_transfer_is_not_computed_and_keeps_its_blocks_until_its_end() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.compute("t", 2)
    await callbacks()
    made.sources.stop()
    assert (made.engine.calls["abort"], made.num_free) == (1, 2)
    with pytest.raises(GivenUp, match="cancelled"):
        await made.job.done
    made.sources.end("failed")
    assert made.num_free == 4


async def test_a_layer_that_comes_after_the_end_gives_its_blocks_back() -> None:
    """The step was under way when the transfer ended."""
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    request = made.engine.submitted["t"]
    made.sources.end("failed", "the consumer left")
    table = made.engine.blocks.allocate("t", 3)
    assert table is not None
    assert request.on_layer is not None
    request.on_layer(table, 0, 3)
    made.engine.blocks.free(table)
    assert made.num_free == 2
    await callbacks()
    assert (made.num_free, made.sources.computed_to) == (4, [])


async def test_a_cancelled_call_fails_the_transfer() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.compute("t", 2)
    await callbacks()
    made.job.cancel("its call was cancelled")
    assert (made.sources.failed, made.num_free) == (["its call was cancelled"], 4)


async def test_a_failed_step_fails_the_transfer() -> None:
    made = Made()
    made.job.submit(PROMPT, GREEDY)
    made.engine.fail("t")
    with pytest.raises(PrefillFailed, match="a step failed") as error:
        await made.job.done
    assert not isinstance(error.value, GivenUp)
    assert made.num_free == 4


async def test_nothing_is_submitted_for_a_transfer_that_has_stopped() -> None:
    made = Made()
    made.sources.stop()
    with pytest.raises(GivenUp):
        made.job.submit(PROMPT, GREEDY)
    assert made.engine.submitted == {}


@pytest.mark.parametrize("refusal", [PlanError("no such block"), PeerLostError("not connected")])
async def test_a_destination_that_cannot_be_written_to_is_refused(refusal: ConnectorError) -> None:
    sources = FakeSources()
    sources.refuses = refusal
    with pytest.raises(type(refusal)):
        WriteJob(FakeEngine(), sources, DESTINATION)  # type: ignore[arg-type]
