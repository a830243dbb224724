"""Answers are the same with drafts as without, token for token; and drafts are right often enough to be of use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, EngineRequest, ModelError, SamplingParams
from engine.blocks import HashChain, root_hash
from engine.sequence import Sequence, new_sequence
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.proposer import wanted_drafts
from tests.engine.driver import GREEDY, Heard, request, running, submit
from tests.engine.tiny import VOCABULARY, Tiny, make_tiny, prompt_of

HOT = SamplingParams(temperature=1.3, seed=11, top_p=0.9, repetition_penalty=1.1)


def repeating(period: int, length: int) -> list[int]:
    """A prompt whose end stood before."""
    return [(place % period) * 5 + 3 for place in range(length)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Another model with the same vocabulary."""
    return make_tiny(tmp_path_factory.mktemp("small"), "Qwen3ForCausalLM", num_hidden_layers=1)


def settings(kind: str, drafter: Tiny | None) -> dict[str, Any]:
    return {"speculation": kind, "draft_model": str(drafter.path) if drafter else "", "kv_cache_bytes": 1 << 20}


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("kind", ["prompt_lookup", "draft_model"])
def test_answers_are_the_same(llama: Tiny, small: Tiny, kind: str, prefix_cache: bool) -> None:
    prompts = [repeating(5, 23), prompt_of(9, 3), repeating(3, 16), prompt_of(1, 4)]
    with running(llama) as plain:
        seeded = [submit(plain, str(n), prompt, 24, sampling=HOT).tokens() for n, prompt in enumerate(prompts)]
    drafter = small if kind == "draft_model" else None
    for budget in (6, 64):
        with running(
            llama, prefix_cache=prefix_cache, max_num_batched_tokens=budget, num_drafts=3, **settings(kind, drafter)
        ) as engine:
            for turn in range(2):
                greedy = [submit(engine, f"g{n}", prompt, 24) for n, prompt in enumerate(prompts)]
                hot = [submit(engine, f"h{n}", prompt, 24, sampling=HOT) for n, prompt in enumerate(prompts)]
                assert [one.tokens() for one in greedy] == [llama.greedy(prompt, 24) for prompt in prompts], turn
                assert [one.tokens() for one in hot] == seeded
            assert engine.stats().drafts_verified > 0


def test_a_model_that_drafts_for_itself_is_always_right(llama: Tiny) -> None:
    prompt = prompt_of(9, 3)
    with running(llama, num_drafts=3, prefix_cache=True, **settings("draft_model", llama)) as engine:
        assert submit(engine, "one", prompt, 25).tokens() == llama.greedy(prompt, 25)
        stats = engine.stats()
        assert stats.drafts_accepted == stats.drafts_verified == 18
        assert stats.steps == 1 + 6
        # What was published has been written by both: otherwise drafts after a hit would be wrong.
        again = submit(engine, "two", [*prompt, *llama.greedy(prompt, 9)], 13)
        assert again.tokens() == llama.greedy([*prompt, *llama.greedy(prompt, 9)], 13)
        stats = engine.stats()
        assert stats.prompt_tokens_cached > 8
        assert stats.drafts_accepted == stats.drafts_verified


def test_stop_tokens_among_accepted_drafts_end_the_answer(llama: Tiny) -> None:
    prompt = prompt_of(9, 3)
    expected = llama.greedy(prompt, 20)
    stop = expected[6]
    with running(llama, num_drafts=5, **settings("draft_model", llama)) as engine:
        heard = submit(engine, "one", prompt, 20, stop_token_ids=frozenset({stop}))
        assert heard.tokens() == expected[: expected.index(stop) + 1]


def test_in_a_pool_that_is_too_small_nobody_loses_blocks_for_drafts(llama: Tiny) -> None:
    prompts = [prompt_of(9 + number, number) for number in range(4)]
    with running(
        llama, num_drafts=4, **{**settings("draft_model", llama), "kv_cache_bytes": 2 * 14 * 1024 + 4096}
    ) as engine:
        heard = [submit(engine, str(n), prompt, 20) for n, prompt in enumerate(prompts)]
        assert [one.tokens() for one in heard] == [llama.greedy(prompt, 20) for prompt in prompts]
        assert engine.stats().preemptions > 0


def test_a_retained_table_is_handed_over_with_the_drafters_pages_written(llama: Tiny) -> None:
    with running(llama, num_drafts=3, **settings("draft_model", llama)) as engine:
        heard = Heard()
        asked = request("kept", prompt_of(9, 1), 1, heard, retain=True)
        engine.submit(asked)
        heard.tokens()
        assert asked.table is not None
        assert set(asked.table.by_group()) == {"full", "draft.full"}
        for layer in (2, 3):  # the drafter's
            pages = engine._pool.pages[layer][asked.table.groups["draft.full"]]
            written = pages.transpose(0, 1).flatten(1, 2)[:, :9]
            assert torch.isfinite(written).all()
        engine.free(asked.table)


def sequence_of(tokens: list[int], num_output: int, max_tokens: int, **rest: Any) -> Sequence:
    asked = EngineRequest(
        request_id="x",
        prompt_token_ids=tokens[: len(tokens) - num_output],
        output_token_ids=tokens[len(tokens) - num_output :],
        sampling=GREEDY,
        max_tokens=max_tokens,
        stop_token_ids=frozenset({99}),
        sink=lambda output: None,
        **rest,
    )
    return new_sequence(asked, HashChain(root_hash("m"), 4))


@pytest.mark.parametrize(
    ("tokens", "num_output", "max_tokens", "model_len", "wanted"),
    [
        ([1, 2, 3], 1, 20, 100, 4),
        ([1, 2, 3], 1, 4, 100, 2),
        ([1, 2, 3], 1, 2, 100, 0),
        ([1, 2, 3], 1, 20, 6, 2),
        ([1, 2, 3], 0, 20, 100, 0),
        ([1, 2, 99], 1, 20, 100, 0),
    ],
)
def test_drafts_are_wanted_where_they_can_be_of_use(
    tokens: list[int], num_output: int, max_tokens: int, model_len: int, wanted: int
) -> None:
    assert wanted_drafts(sequence_of(tokens, num_output, max_tokens), 4, model_len) == wanted


def test_nothing_is_drafted_while_pages_are_sent() -> None:
    assert wanted_drafts(sequence_of([1, 2, 3], 1, 9, on_layer=lambda table, layer, count: None), 4, 99) == 0


def test_prompt_lookup_finds_what_followed() -> None:
    sequence = sequence_of([7, 8, 9, 10, 11, 5, 8, 9], 1, 20)
    PromptLookup(3, 100).propose([sequence])
    assert sequence.drafts == [10, 11, 5]
    other = sequence_of([1, 2, 3, 4], 1, 20)
    PromptLookup(3, 100).propose([other])
    assert other.drafts == []


def test_a_draft_model_of_another_vocabulary_is_refused(llama: Tiny, tmp_path: Path) -> None:
    other = make_tiny(tmp_path, vocab_size=VOCABULARY + 1)
    with pytest.raises(ModelError, match=f"has {VOCABULARY + 1} tokens, the model {VOCABULARY}"):
        Engine(llama.info, EngineConfig(dtype="float32", speculation="draft_model", draft_model=str(other.path)))


@pytest.mark.parametrize("changes", [{"speculation": "draft_model"}, {"draft_model": "/somewhere"}])
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the folder of a draft model is needed for 'draft_model', and for nothing"):
        EngineConfig(**changes)
