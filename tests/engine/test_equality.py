"""The engine's greedy tokens are those of transformers' own `generate`, in float32, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.families import FAMILIES
from engine.families.rope import ROPE_TYPES
from engine.runner import forward
from tests.engine.driver import running, submit
from tests.engine.tiny import MODEL_TYPES, Tiny, make_tiny, prompt_of


def test_every_supported_architecture_is_covered() -> None:
    assert set(MODEL_TYPES) == set(FAMILIES)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_every_architecture_equals_generate(architecture: str, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, architecture)
    prompts = [prompt_of(length, salt) for salt, length in enumerate((1, 5, 16, 23))]
    expected = [tiny.greedy(prompt, 12) for prompt in prompts]
    assert len({tuple(one) for one in expected}) == len(expected)
    with running(tiny, max_num_batched_tokens=10) as engine:
        heard = []
        for number, prompt in enumerate(prompts):
            heard.append(submit(engine, str(number), prompt, 12))
            heard[-1].wait_for(2)  # the next one's prompt arrives while this one is being written
        assert [one.tokens() for one in heard] == expected


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_logits_of_chunks_are_those_of_the_whole(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_tiny(tmp_path, architecture)
    seen: list[torch.Tensor] = []

    def observed(model: Any, batch: Any) -> torch.Tensor:
        logits = forward(model, batch)
        seen.extend(logits)
        return logits

    monkeypatch.setattr("engine.executor.forward", observed)
    prompt = prompt_of(29, 6)
    with running(tiny, max_num_batched_tokens=7) as engine:
        answer = submit(engine, "one", prompt, 8).tokens()
    assert len(seen) == len(answer)
    for place, logits in enumerate(seen):
        torch.testing.assert_close(logits, tiny.logits([*prompt, *answer[:place]]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_rotary_embedding_equals_generate(rope: dict[str, Any], tmp_path: Path) -> None:
    assert {"default", "linear", "yarn", "llama3"} == set(ROPE_TYPES)
    tiny = make_tiny(tmp_path, rope_parameters={"rope_theta": 1e4, **rope})
    prompts = [prompt_of(length, salt) for salt, length in enumerate((3, 30))]
    with running(tiny, max_num_batched_tokens=10) as engine:
        heard = [submit(engine, str(number), prompt, 12) for number, prompt in enumerate(prompts)]
        assert [one.tokens() for one in heard] == [tiny.greedy(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(("block_size", "budget"), [(1, 3), (4, 8), (4, 9), (16, 16), (16, 64)])
def test_prompts_around_the_borders_of_blocks_and_chunks(llama: Tiny, block_size: int, budget: int) -> None:
    lengths = sorted({1, 2, block_size, block_size + 1, max(1, block_size - 1), budget - 1, budget, budget + 1, 33})
    prompts = [prompt_of(length, salt) for salt, length in enumerate(lengths)]
    with running(llama, num_blocks=512 // block_size, block_size=block_size, max_num_batched_tokens=budget) as engine:
        heard = [submit(engine, str(number), prompt, 6) for number, prompt in enumerate(prompts)]
        assert [one.tokens() for one in heard] == [llama.greedy(prompt, 6) for prompt in prompts]


def test_a_sequence_may_fill_the_model_length_exactly(llama: Tiny) -> None:
    prompt = prompt_of(40, 3)
    with running(llama, max_model_len=48) as engine:
        assert submit(engine, "full", prompt, 8).tokens() == llama.greedy(prompt, 8)
