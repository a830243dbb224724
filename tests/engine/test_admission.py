"""What never enters the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine import BlockTable, EngineError, RequestTooLong, SamplingParams
from engine.admission import check_request
from tests.engine.driver import request

SIZES: dict[str, int] = {"vocab_size": 50, "max_model_len": 20, "block_size": 4}


def check(prompt: list[int], max_tokens: int, **rest: Any) -> None:
    check_request(request("it", prompt, max_tokens, lambda output: None, **rest), **SIZES)


def test_what_just_fits() -> None:
    check([0, 49], 18)
    check([1], 2, output_token_ids=[49])
    check([1] * 8, 5, output_token_ids=[2], table=BlockTable("it", {"full": [5, 3]}), computed_tokens=8)
    check([1], 1, sampling=SamplingParams(temperature=0.0, top_k=10**9, seed=2**64 - 1, min_p=1.0))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "rest", "message"),
    [
        ([], 1, {}, "has 0 prompt tokens"),
        ([1], 0, {}, "0 of at most 0 output tokens"),
        ([1], 1, {"output_token_ids": [2]}, "1 of at most 1 output tokens"),
        ([1, 50], 1, {}, "tokens from 1 to 50; the model's are 0 to 49"),
        ([-1, 3], 1, {}, "tokens from -1 to 3"),
        ([1], 5, {"output_token_ids": [50]}, "tokens from 50 to 50"),
        ([1, 2], 5, {"computed_tokens": 1}, "claims 1 computed tokens; its blocks hold 0"),
        ([1, 2], 5, {"computed_tokens": -1, "table": BlockTable("it", {"full": [1]})}, "claims -1 computed tokens"),
        (
            [1, 2],
            5,
            {"computed_tokens": 2, "table": BlockTable("it", {"full": [1]})},
            "one of its 2 tokens has to be computed",
        ),
        ([1] * 9, 5, {"computed_tokens": 5, "table": BlockTable("it", {"full": [1]})}, "its blocks hold 4"),
    ],
)
def test_requests_that_contradict_themselves(
    prompt: list[int], max_tokens: int, rest: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        check(prompt, max_tokens, **rest)


def test_requests_that_never_fit() -> None:
    with pytest.raises(RequestTooLong, match=r"2 prompt tokens and 19 output tokens do not fit: at most 20") as caught:
        check([1, 2], 19)
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.max_model_len) == (2, 19, 20)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
)
def test_parameters_that_are_no_number(name: str, nonsense: Any) -> None:
    with pytest.raises(EngineError, match=f"has {name} {nonsense}; it must be within"):
        check([1], 1, sampling=SamplingParams(**{name: nonsense}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("frequency_penalty", 1e30),
    ],
)
def test_parameters_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(EngineError, match=f"has {name} "):
        check([1], 1, sampling=SamplingParams(**{name: value}))
