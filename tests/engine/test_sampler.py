"""Draws have exactly the distribution that was asked for: every uniform number of a fine grid is tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import engine.sampler as module
from engine.blocks import HashChain, root_hash
from engine.request import EngineRequest, SamplingParams
from engine.rows import Row
from engine.sampler import COLDEST, WIDTHS, Drawn, sample
from engine.sequence import new_sequence

GRID = 1000


def sequence(sampling: SamplingParams, tokens: int = 3, name: str = "one", drafts: int = 0) -> Row:
    """A row of a sequence of so many tokens, and so many drafts."""
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=[0] * tokens,
        sampling=sampling,
        max_tokens=9,
        stop_token_ids=frozenset(),
        sink=lambda output: None,
    )
    return Row(new_sequence(request, HashChain(root_hash("m"), 4)), (0,) * drafts)


def draw(logits: torch.Tensor, sequences: list[Row]) -> list[Drawn]:
    """`sample` on rows that something can be drawn from."""
    drawn = sample(logits, sequences)
    assert None not in drawn
    return [one for one in drawn if one is not None]


def logits_of(vocabulary: int, spread: float = 2.0, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, generator=generator) * spread


def expected_distribution(logits: torch.Tensor, sampling: SamplingParams) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The definition, spelled out for one row over the whole vocabulary."""
    scaled = logits.double().numpy() / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    kept = order[: sampling.top_k or len(order)]
    nucleus: list[int] = []
    share, total = 0.0, weights[kept].sum()
    for token in kept:
        if nucleus and (share >= sampling.top_p * total or weights[token] < sampling.min_p * weights[order[0]]):
            break
        nucleus.append(token)
        share += weights[token]
    result = np.zeros(len(order))
    result[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return result


def drawn_distribution(
    logits: torch.Tensor, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> np.ndarray[Any, np.dtype[np.float64]]:
    grid = (np.arange(GRID) + 0.5) / GRID
    counts = np.zeros(len(logits))
    for part in np.array_split(grid, 4):
        monkeypatch.setattr(module, "uniforms", lambda seeds, positions, part=part: part)
        rows = logits.expand(len(part), -1).contiguous()
        for drawn in draw(rows, [sequence(sampling)] * len(part)):
            counts[drawn.token_id] += 1
    return counts / GRID


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=2.5),
        SamplingParams(top_k=1),
        SamplingParams(top_k=5),
        SamplingParams(top_k=5000),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.01),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=20, top_p=0.8, min_p=0.02, temperature=1.5),
        SamplingParams(top_k=8, top_p=0.999),
    ],
    ids=lambda sampling: ",".join(f"{name}={value}" for name, value in _changed(sampling)) or "plain",
)
@pytest.mark.parametrize("vocabulary", [40, 700])
def test_distribution(sampling: SamplingParams, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(vocabulary)
    expected = expected_distribution(logits, sampling)
    drawn = drawn_distribution(logits, sampling, monkeypatch)
    assert set(drawn.nonzero()[0]) <= set(expected.nonzero()[0])
    assert abs(drawn - expected).max() <= 1.5 / GRID


def _changed(sampling: SamplingParams) -> list[tuple[str, float]]:
    plain = SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p")
    return [(name, getattr(sampling, name)) for name in names if getattr(sampling, name) != getattr(plain, name)]


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(top_p=0.95), SamplingParams(min_p=0.2), SamplingParams(top_k=400), SamplingParams(top_k=700)],
)
def test_rows_that_the_first_pass_does_not_settle(sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(700, spread=0.2)  # so flat that 256 tokens hold about half of it
    expected = expected_distribution(logits, sampling)
    assert np.count_nonzero(expected) > WIDTHS[0]
    drawn = drawn_distribution(logits, sampling, monkeypatch)
    assert set(drawn.nonzero()[0]) <= set(expected.nonzero()[0])
    assert abs(drawn - expected).max() <= 1.5 / GRID


@pytest.mark.parametrize("widths", [(), (16,), (16, 64), (16, 64, 650), (1000,)])
def test_it_does_not_matter_how_many_tokens_are_looked_at_first(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [
        SamplingParams(seed=seed, temperature=temperature, top_p=top_p)
        for seed in range(8)
        for temperature in (0.3, 1.0, 3.0)
        for top_p in (0.5, 0.99)
    ]
    logits = torch.stack([logits_of(700, seed=number) for number in range(len(kinds))])
    rows = [sequence(kind) for kind in kinds]
    expected = sample(logits, rows)
    monkeypatch.setattr(module, "WIDTHS", widths)
    assert sample(logits, rows) == expected


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, COLDEST])
def test_the_coldest_draws_are_greedy(temperature: float) -> None:
    logits = logits_of(700)[None] * 20
    for sampling in (SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.9)):
        assert sample(logits, [sequence(sampling)]) == sample(logits, [sequence(SamplingParams(temperature=0.0))])


@pytest.mark.parametrize("number", [0.0, float(np.nextafter(1.0, 0.0))])
def test_the_ends_of_the_interval_draw_tokens_that_have_weight(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "uniforms", lambda seeds, positions: np.full(len(seeds), number))
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 100, 200]] = torch.tensor([1.0, 2.0, 1.5])
    for sampling in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=2), SamplingParams(min_p=0.1)):
        (drawn,) = draw(logits, [sequence(sampling)])
        assert drawn.token_id in (7, 100, 200)


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = logits_of(50)
    logits[[11, 30]] = 99.0
    (drawn,) = draw(logits[None], [sequence(SamplingParams(temperature=0.0, top_k=3, top_p=0.1, seed=8))])
    assert drawn.token_id == 11
    assert drawn.logprob == pytest.approx(float(torch.log_softmax(logits, -1)[11]), abs=1e-5)


def test_a_row_does_not_depend_on_its_company() -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9),
        SamplingParams(seed=3, top_p=0.999, temperature=5.0),  # needs all tokens
        SamplingParams(seed=4, top_k=7, repetition_penalty=1.5),
        SamplingParams(seed=5, min_p=0.1, presence_penalty=0.5),
    ]
    logits = torch.stack([logits_of(600, seed=number) for number in range(len(kinds))])
    sequences = [sequence(kind, tokens=3 + number) for number, kind in enumerate(kinds)]
    together = sample(logits, sequences)
    assert together == [sample(logits[n : n + 1], [one])[0] for n, one in enumerate(sequences)]
    backwards = sample(logits.flip(0), sequences[::-1])
    assert backwards[::-1] == together


def test_a_draft_counts_as_a_token_of_the_position() -> None:
    logits = logits_of(50).expand(4, -1)
    hot = SamplingParams(temperature=3.0, seed=7)
    as_tokens = draw(logits, [sequence(hot, tokens=3 + more) for more in range(4)])
    assert draw(logits, [sequence(hot, tokens=3, drafts=more) for more in range(4)]) == as_tokens
    assert len({one.token_id for one in as_tokens}) > 1


def test_the_logits_are_left_as_they_are() -> None:
    logits = logits_of(60)[None]
    before = logits.clone()
    sample(logits, [sequence(SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, top_k=4))])
    assert torch.equal(logits, before)


def test_no_rows() -> None:
    assert sample(torch.empty(0, 30), []) == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nothing_is_drawn_from_logits_that_are_not_finite_and_no_other_row_suffers(bad: float) -> None:
    logits = torch.stack([logits_of(30), logits_of(30)])
    alone = sample(logits[:1], [sequence(SamplingParams())])
    logits[1, 4] = bad
    assert sample(logits, [sequence(SamplingParams()), sequence(SamplingParams(top_p=0.5))]) == [*alone, None]
    assert sample(torch.full((1, 30), -torch.inf), [sequence(SamplingParams(temperature=0.0))]) == [None]
