"""Engines that remember: answers are the same, and what was computed is not computed again."""

from __future__ import annotations

import random

import pytest

from engine import SamplingParams
from tests.engine.driver import Heard, request, running, submit
from tests.engine.tiny import Tiny, prompt_of

STEM = prompt_of(30, 2)


def test_a_prompt_is_not_computed_again(llama: Tiny) -> None:
    prompt = prompt_of(18, 1)
    with running(llama, prefix_cache=True) as engine:
        assert submit(engine, "one", prompt, 6).tokens() == llama.greedy(prompt, 6)
        before = engine.stats()
        heard = submit(engine, "two", prompt, 6)
        assert heard.tokens() == llama.greedy(prompt, 6)
        after = engine.stats()
        assert after.prompt_tokens_computed - before.prompt_tokens_computed == 1
        assert after.prompt_tokens_cached - before.prompt_tokens_cached == 17
        assert {(one.cached_tokens, one.prompt_tokens_computed) for one in heard.outputs} == {(17, 1)}  # type: ignore[union-attr]


def test_an_answer_is_remembered_too(llama: Tiny) -> None:
    prompt = prompt_of(10, 1)
    with running(llama, prefix_cache=True) as engine:
        answer = submit(engine, "one", prompt, 9).tokens()
        heard = submit(engine, "two", [*prompt, *answer, 5, 6], 4)
        assert heard.tokens() == llama.greedy([*prompt, *answer, 5, 6], 4)
        # All but the last drawn token, which was never run through the model.
        assert heard.outputs[0].cached_tokens == 18  # type: ignore[union-attr]


@pytest.mark.parametrize("budget", [5, 64])
def test_sharers_in_one_step_and_at_odd_lengths(llama: Tiny, budget: int) -> None:
    prompts = [[*STEM[:length], *prompt_of(tail, length)] for length in (0, 3, 7, 8, 9, 29, 30) for tail in (1, 2, 6)]
    expected = [llama.greedy(prompt, 7) for prompt in prompts]
    with running(llama, num_blocks=400, prefix_cache=True, max_num_batched_tokens=budget) as engine:
        for turn in range(2):
            heard = [submit(engine, f"{turn} {n}", prompt, 7) for n, prompt in enumerate(prompts)]
            assert [one.tokens() for one in heard] == expected
        assert engine.stats().prompt_tokens_cached > sum(map(len, prompts)) / 2


def test_in_a_small_pool_with_preemption_and_eviction(llama: Tiny) -> None:
    chance = random.Random(4)
    prompts = [[*STEM[: chance.randrange(12)], *prompt_of(chance.randrange(1, 9), n)] for n in range(12)]
    expected = [llama.greedy(prompt, 14) for prompt in prompts]
    with running(llama, num_blocks=14, prefix_cache=True, max_num_batched_tokens=9) as engine:
        for turn in range(3):
            heard = [submit(engine, f"{turn} {n}", prompt, 14) for n, prompt in enumerate(prompts)]
            engine._blocks.validate()
            assert [one.tokens() for one in heard] == expected
        assert engine.stats().preemptions > 0
        assert engine.stats().prompt_tokens_cached > 0


@pytest.mark.parametrize("field", ["cache_salt", "adapter"])
def test_salts_and_adapters_keep_apart(llama: Tiny, field: str) -> None:
    prompt = prompt_of(18, 1)
    with running(llama, prefix_cache=True) as engine:
        submit(engine, "one", prompt, 2, **{field: "mine"}).tokens()
        for other, cached in ({field: "yours"}, 0), ({}, 0), ({field: "mine"}, 17):
            heard = submit(engine, "other", prompt, 2, **other)
            heard.tokens()
            assert heard.outputs[0].cached_tokens == cached  # type: ignore[union-attr]


def test_aborted_requests_leave_what_they_computed(llama: Tiny) -> None:
    prompt = prompt_of(18, 1)
    with running(llama, prefix_cache=True) as engine:
        heard = submit(engine, "one", prompt, 60)
        heard.wait_for(3)
        engine.abort("one")
        again = submit(engine, "two", prompt, 5)
        assert again.tokens() == llama.greedy(prompt, 5)
        assert again.outputs[0].cached_tokens == 17  # type: ignore[union-attr]


def test_retained_and_lent_blocks_are_shared_and_outlive_their_owner(llama: Tiny) -> None:
    prompt = prompt_of(18, 1)
    with running(llama, prefix_cache=True) as engine:
        heard = Heard()
        asked = request("kept", prompt, 1, heard, retain=True)
        engine.submit(asked)
        heard.tokens()
        assert asked.table is not None
        other = submit(engine, "other", prompt, 8)
        assert other.tokens() == llama.greedy(prompt, 8)
        assert other.outputs[0].cached_tokens == 17  # type: ignore[union-attr]
        engine._blocks.validate()
        engine.free(asked.table)


def test_imported_pages_are_published_when_the_request_brings_them(llama: Tiny) -> None:
    prompt = prompt_of(18, 1)
    with running(llama, prefix_cache=True) as engine:
        submit(engine, "one", prompt, 2, cache_salt="elsewhere").tokens()
        heard = Heard()
        asked = request("kept", prompt, 1, heard, retain=True, cache_salt="elsewhere")
        engine.submit(asked)
        (first,) = heard.tokens()
        table = asked.table
        assert table is not None
        table.published = 0  # as if they had come from another engine
        moved = submit(engine, "moved", prompt, 4, table=table, computed_tokens=18, output_token_ids=[first])
        assert moved.tokens() == llama.greedy(prompt, 4)[1:]
        here = submit(engine, "here", [*prompt, 3], 4)
        assert here.tokens() == llama.greedy([*prompt, 3], 4)
        assert here.outputs[0].cached_tokens == 0  # type: ignore[union-attr]


def test_seeded_answers_do_not_depend_on_hits(llama: Tiny) -> None:
    hot = SamplingParams(temperature=1.2, seed=5, frequency_penalty=0.3)
    prompt = prompt_of(21, 4)
    with running(llama) as plain:
        expected = submit(plain, "one", prompt, 20, sampling=hot).tokens()
    with running(llama, prefix_cache=True) as engine:
        assert [submit(engine, str(n), prompt, 20, sampling=hot).tokens() for n in range(3)] == [expected] * 3


def test_what_was_computed_from_logits_that_are_not_finite_is_not_shared(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import engine.executor as module
    from tests.engine.tiny import VOCABULARY

    prompt = prompt_of(18, 1)
    with running(llama, prefix_cache=True) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(
                module, "forward", lambda model, batch: torch.full((len(batch.logits_rows), VOCABULARY), torch.nan)
            )
            submit(engine, "bad", prompt, 4).end()
        good = submit(engine, "good", prompt, 4)
        assert good.tokens() == llama.greedy(prompt, 4)
        assert good.outputs[0].cached_tokens == 0  # type: ignore[union-attr]
