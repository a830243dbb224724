"""What no worker can serve is refused before anything is held for it."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from rpc.errors import CallRefused
from rpc.v1 import common_pb2

MAX_TEMPERATURE = 100.0


def check_prompt(token_ids: Sequence[int], max_tokens: int, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse an empty or too long prompt, and tokens that the model does not have.

    Raises:
        CallRefused: INVALID_ARGUMENT.
    """
    if not token_ids:
        raise _invalid("prompt_token_ids is empty; a prompt has at least one token")
    if max_tokens < 1:
        raise _invalid(f"max_tokens is {max_tokens}; at least one token has to be asked for")
    if len(token_ids) + max_tokens > max_model_len:
        raise _invalid(
            f"the prompt has {len(token_ids)} tokens and max_tokens is {max_tokens}; together at most "
            f"{max_model_len} fit"
        )
    largest = max(token_ids)
    if largest >= vocab_size:
        raise _invalid(f"token {largest} is not in the model's vocabulary of {vocab_size}")


def check_sampling(sampling: common_pb2.SamplingParams) -> None:
    """Refuse parameters that have no meaning, among them those that a sender forgot to set.

    Raises:
        CallRefused: INVALID_ARGUMENT, naming the field.
    """
    # Comparisons are written so that NaN fails them.
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise _invalid(f"sampling.temperature is {sampling.temperature}; it must be within 0 to {MAX_TEMPERATURE:g}")
    if not 0 < sampling.top_p <= 1:
        raise _invalid(f"sampling.top_p is {sampling.top_p}; it must be above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise _invalid(f"sampling.min_p is {sampling.min_p}; it must be within 0 to 1")
    if not 0 < sampling.repetition_penalty <= 100:
        raise _invalid(f"sampling.repetition_penalty is {sampling.repetition_penalty}; it must be above 0, at most 100")
    for name in ("frequency_penalty", "presence_penalty"):
        if not -100 <= getattr(sampling, name) <= 100:
            raise _invalid(f"sampling.{name} is {getattr(sampling, name)}; it must be within -100 to 100")


def _invalid(message: str) -> CallRefused:
    return CallRefused(grpc.StatusCode.INVALID_ARGUMENT, message)
