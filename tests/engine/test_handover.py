"""A sequence moved between engines, as bytes of its blocks and one drawn token, continues as if it had stayed."""

from __future__ import annotations

import ctypes

import pytest

from engine import BlockTable, Engine, SamplingParams
from tests.engine.driver import GREEDY, Heard, request, running, submit
from tests.engine.tiny import Tiny, prompt_of

SEEDED = SamplingParams(temperature=1.5, seed=2**63 + 11, top_p=0.95)
PENALISED = SamplingParams(
    temperature=1.0, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, top_k=50
)
LENGTH = 20


def copy_blocks(source: Engine, sources: list[int], destination: Engine, destinations: list[int]) -> None:
    """Move the bytes of whole blocks, as a transfer would."""
    stride = source.geometry.groups[0].layers[0].block_stride
    for there, here in zip(sources, destinations, strict=True):
        ctypes.memmove(destination.memory.address + here * stride, source.memory.address + there * stride, stride)


def prefill(engine: Engine, prompt: list[int], sampling: SamplingParams) -> tuple[int, BlockTable]:
    """Draw one token and keep the blocks."""
    heard = Heard()
    asked = request("prefill", prompt, 1, heard, sampling=sampling, retain=True)
    engine.submit(asked)
    (first,) = heard.tokens()
    assert asked.table is not None
    return first, asked.table


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 30])
def test_continues_as_if_it_had_stayed(llama: Tiny, sampling: SamplingParams, length: int) -> None:
    prompt = prompt_of(length, 9)
    with running(llama, max_num_batched_tokens=7) as first, running(llama, max_num_batched_tokens=5) as second:
        whole = submit(first, "whole", prompt, LENGTH, sampling=sampling).tokens()
        token, source = prefill(first, prompt, sampling)
        # Other block ids than the source's, and company in the batch.
        shift = second.reserve("shift", 11)
        other = submit(second, "other", prompt_of(17, 4), LENGTH, sampling=SEEDED)
        other.wait_for(1)
        destination = second.reserve("moved", length)
        assert destination is not None
        assert shift is not None
        assert destination.block_ids != source.block_ids
        before = second.stats().prompt_tokens_computed
        copy_blocks(first, source.block_ids, second, destination.block_ids)
        first.free(source)
        moved = submit(
            second,
            "moved",
            prompt,
            LENGTH,
            sampling=sampling,
            table=destination,
            computed_tokens=length,
            output_token_ids=[token],
        )
        assert [token, *moved.tokens()] == whole
        other.tokens()
        second.free(shift)
        assert second.stats().prompt_tokens_computed == before


def test_no_prompt_token_is_computed_again(llama: Tiny) -> None:
    prompt = prompt_of(12, 2)
    with running(llama) as first, running(llama) as second:
        token, source = prefill(first, prompt, GREEDY)
        destination = second.reserve("moved", len(prompt))
        assert destination is not None
        copy_blocks(first, source.block_ids, second, destination.block_ids)
        first.free(source)
        moved = submit(
            second, "moved", prompt, 4, table=destination, computed_tokens=len(prompt), output_token_ids=[token]
        )
        moved.tokens()
        assert [output.position for output in moved.outputs] == [13, 14, 15]  # type: ignore[union-attr]
        assert [output.prompt_tokens_computed for output in moved.outputs] == [0, 0, 0]  # type: ignore[union-attr]
        stats = second.stats()
        # The first token and each drawn one but the last.
        assert (stats.tokens_computed, stats.prompt_tokens_computed, stats.steps) == (3, 0, 3)


def test_a_moved_sequence_survives_preemption(llama: Tiny) -> None:
    prompt = prompt_of(12, 2)
    expected = llama.greedy(prompt, LENGTH)
    with running(llama, num_blocks=20) as first, running(llama, num_blocks=10) as second:
        token, source = prefill(first, prompt, GREEDY)
        older = submit(second, "older", prompt_of(4, 1), 24)
        older.wait_for(1)
        destination = second.reserve("moved", len(prompt))
        assert destination is not None
        copy_blocks(first, source.block_ids, second, destination.block_ids)
        first.free(source)
        moved = submit(
            second, "moved", prompt, LENGTH, table=destination, computed_tokens=len(prompt), output_token_ids=[token]
        )
        assert [token, *moved.tokens()] == expected
        assert older.tokens() == llama.greedy(prompt_of(4, 1), 24)
        assert second.stats().preemptions > 0


def test_one_that_brings_its_blocks_does_not_stop_the_only_one_that_runs(llama: Tiny) -> None:
    prompt = prompt_of(8, 2)
    with running(llama, num_blocks=20) as first, running(llama, num_blocks=4, max_num_seqs=1) as second:
        token, source = prefill(first, prompt, GREEDY)
        alone = submit(second, "alone", prompt_of(4, 1), 12)
        destination = second.reserve("moved", len(prompt))
        while destination is None:  # until the other one has been admitted
            destination = second.reserve("moved", len(prompt))
        copy_blocks(first, source.block_ids, second, destination.block_ids)
        first.free(source)
        moved = submit(
            second, "moved", prompt, 6, table=destination, computed_tokens=len(prompt), output_token_ids=[token]
        )
        assert [token, *moved.tokens()] == llama.greedy(prompt, 6)
        assert alone.tokens() == llama.greedy(prompt_of(4, 1), 12)
