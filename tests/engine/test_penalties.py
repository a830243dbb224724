"""Penalties against their definitions, token by token."""

from __future__ import annotations

import random

import pytest
import torch

from engine.blocks import HashChain, root_hash
from engine.penalties import TokenCounts, apply_penalties, has_penalties
from engine.request import EngineRequest, SamplingParams
from engine.rows import Row
from engine.sequence import Sequence, new_sequence

VOCABULARY = 40


def naive(logits: list[float], prompt: list[int], output: list[int], sampling: SamplingParams) -> list[float]:
    """The definitions."""
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        count = output.count(token)
        if count:
            logit -= count * sampling.frequency_penalty + sampling.presence_penalty
        result.append(logit)
    return result


def sequence(prompt: list[int], output: list[int], sampling: SamplingParams) -> Sequence:
    return new_sequence(
        EngineRequest(
            request_id="one",
            prompt_token_ids=prompt,
            output_token_ids=output,
            sampling=sampling,
            max_tokens=99,
            stop_token_ids=frozenset(),
            sink=lambda told: None,
        ),
        HashChain(root_hash("m"), 4),
    )


def rows_of(*sequences: Sequence) -> list[Row]:
    return [Row(one) for one in sequences]


KINDS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6),
    SamplingParams(frequency_penalty=0.3),
    SamplingParams(presence_penalty=-0.8),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=-0.5, presence_penalty=1.5),
]


def test_a_batch_of_all_kinds() -> None:
    chance = random.Random(2)
    rows = []
    for _ in range(6):
        for kind in KINDS:
            prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 12))]
            output = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(0, 12))]
            rows.append((prompt, output, kind))
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    before = logits.clone()
    penalised = apply_penalties(logits, rows_of(*(sequence(*row) for row in rows)))
    expected = torch.tensor([naive(one, *row) for one, row in zip(logits.tolist(), rows, strict=True)])
    torch.testing.assert_close(penalised, expected)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_kept_up_to_date(kind: SamplingParams) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    one = sequence([1, 2, 3], [], kind)
    apply_penalties(logits, rows_of(one))
    for token in (2, 9, 9, 1):
        one.tokens.append(token)
        if one.counts is not None:
            one.counts.add(token)
    afresh = apply_penalties(logits, rows_of(sequence([1, 2, 3], [2, 9, 9, 1], kind)))
    assert torch.equal(apply_penalties(logits, rows_of(one)), afresh)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_count_as_output_of_their_row_only(kind: SamplingParams) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)).expand(3, -1)
    one = sequence([1, 2, 3], [4], kind)
    penalised = apply_penalties(logits, [Row(one), Row(one, (9,)), Row(one, (9, 2))])
    drawn = rows_of(*(sequence([1, 2, 3], [4, *more], kind) for more in ([], [9], [9, 2])))
    assert torch.equal(penalised, apply_penalties(logits, drawn))
    assert torch.equal(apply_penalties(logits[:1], rows_of(one)), penalised[:1])


def test_without_penalties_nothing_is_copied_or_counted() -> None:
    logits = torch.randn(2, VOCABULARY)
    plain = [sequence([1], [2], SamplingParams()), sequence([1], [], SamplingParams(temperature=0.0))]
    assert apply_penalties(logits, rows_of(*plain)) is logits
    assert plain[0].counts is None
    assert [has_penalties(kind) for kind in KINDS] == [False, True, True, True, True, True]


def test_token_counts() -> None:
    counts = TokenCounts([1, 1, 2], [2, 3, 3])
    counts.add(5)
    assert counts.output == {2: 1, 3: 2, 5: 1}
    assert counts.seen == {1, 2, 3, 5}
