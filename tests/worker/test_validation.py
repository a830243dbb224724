"""Requests that no worker can serve."""

from __future__ import annotations

import math

import grpc
import pytest

from rpc.errors import CallRefused
from rpc.v1.common_pb2 import SamplingParams
from worker.sampling import from_message
from worker.validation import check_prompt, check_sampling


def fine(**changed: float) -> SamplingParams:
    message = SamplingParams(temperature=0.5, top_p=0.9, repetition_penalty=1.0)
    for name, value in changed.items():
        setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "says"),
    [
        ([], 1, "at least one token"),
        ([1, 2], 0, "max_tokens is 0"),
        ([1] * 9, 2, "the prompt has 9 tokens and max_tokens is 2; together at most 10 fit"),
        ([1, 50, 3], 1, "token 50 is not in the model's vocabulary of 50"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(token_ids: list[int], max_tokens: int, says: str) -> None:
    with pytest.raises(CallRefused, match=says) as refused:
        check_prompt(token_ids, max_tokens, vocab_size=50, max_model_len=10)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_prompt_that_just_fits_is_served() -> None:
    check_prompt([49] * 9, 1, vocab_size=50, max_model_len=10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -1.0),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("presence_penalty", 1e9),
    ],
)
def test_a_parameter_without_meaning_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(CallRefused, match=field) as refused:
        check_sampling(fine(**{field: value}))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_that_was_not_filled_in_is_refused() -> None:
    with pytest.raises(CallRefused):
        check_sampling(SamplingParams())


def test_every_parameter_reaches_the_engine() -> None:
    message = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.75,
    )
    check_sampling(message)
    params = from_message(message)
    assert {name: getattr(params, name) for name in params.__struct_fields__} == {
        field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields
    }
