"""The kernel that draws: the inverse of the cumulative distribution, in every instruction set."""

from __future__ import annotations

import math

import pytest
import torch

from engine import _native


def drawn(
    logits: torch.Tensor,
    numbers: list[float],
    temperatures: list[float] | None = None,
    changed: torch.Tensor | None = None,
) -> tuple[list[int], torch.Tensor]:
    rows, width = logits.shape
    changed = logits if changed is None else changed
    tokens, normalizers = torch.empty(rows, dtype=torch.long), torch.empty(rows)
    of_rows = torch.tensor(numbers, dtype=torch.double)
    scales = torch.tensor(temperatures or [1.0] * rows)
    _native.draw(
        logits=logits.data_ptr(),
        changed=changed.data_ptr(),
        rows=rows,
        width=width,
        temperatures=scales.data_ptr(),
        numbers=of_rows.data_ptr(),
        tokens=tokens.data_ptr(),
        normalizers=normalizers.data_ptr(),
    )
    return tokens.tolist(), normalizers


@pytest.fixture(params=_native.available_isas(), autouse=True)
def isa(request: pytest.FixtureRequest, kernels: None) -> None:
    """Each one that runs here."""
    _native.use_isa(request.param)
    torch.manual_seed(0)


@pytest.mark.parametrize("width", [1, 2, 255, 256, 257, 1000, 49152])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0, 1e-6])
def test_a_token_is_where_the_cumulative_distribution_crosses_the_number(width: int, temperature: float) -> None:
    logits = torch.randn(1, width) * 3
    weights = torch.softmax(logits[0].double() / temperature, dim=0)
    cumulative = weights.cumsum(0)
    for number in torch.rand(50, dtype=torch.double).tolist():
        [token], normalizer = drawn(logits, [number], [temperature])
        before = float(cumulative[token] - weights[token])
        assert before - 2e-6 <= number <= float(cumulative[token]) + 2e-6
        assert weights[token] > 0
        torch.testing.assert_close(normalizer, torch.logsumexp(logits, dim=1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("number", [0.0, 1.0 - 2**-53, 1.0])
def test_the_ends_draw_what_has_weight(number: float) -> None:
    logits = torch.full((1, 600), -math.inf)
    logits[0, 300], logits[0, 301] = 1.0, 1.0
    assert drawn(logits, [number])[0] == [300 if number == 0.0 else 301]


def test_at_temperature_0_the_first_of_the_largest_is_drawn() -> None:
    logits = torch.randn(3, 700)
    logits[0, 600] = logits[0, 650] = 9.0
    logits[1, 0] = logits[1, 699] = 9.0
    logits[2, 257] = 9.0
    assert drawn(logits, [0.9] * 3, [0.0] * 3)[0] == [600, 0, 257]


def test_the_token_is_of_what_penalties_left_and_the_normalizer_of_what_was() -> None:
    logits = torch.randn(2, 300)
    changed = torch.randn(2, 300)
    changed[0, 17] = 50.0
    changed[1, 250] = 50.0
    tokens, normalizers = drawn(logits, [0.5, 0.5], [1.0, 0.0], changed)
    assert tokens == [17, 250]
    torch.testing.assert_close(normalizers, torch.logsumexp(logits, dim=1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 299])
def test_a_row_that_nothing_can_be_drawn_from_is_told_and_no_other_suffers(value: float, place: int) -> None:
    logits = torch.randn(3, 300)
    logits[1, place] = value
    alone, _ = drawn(logits[[0, 2]], [0.4, 0.7])
    tokens, normalizers = drawn(logits, [0.4, 0.5, 0.7])
    assert [tokens[0], tokens[2]] == alone
    assert torch.isfinite(normalizers).tolist() == [True, False, True]


def test_a_row_of_nothing_finite_is_told() -> None:
    _, normalizers = drawn(torch.full((1, 300), -math.inf), [0.4])
    assert not torch.isfinite(normalizers).any()
