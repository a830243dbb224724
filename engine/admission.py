"""What is refused before it enters the engine.

Nothing may reach a step that makes it fail or draws nonsense: other requests would fail with it, or nobody would
notice.
"""

from __future__ import annotations

import math

from engine.errors import EngineError, RequestTooLong
from engine.request import EngineRequest, SamplingParams

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "seed": (0, (1 << 64) - 1),
    "repetition_penalty": (1e-3, 1e3),
    "frequency_penalty": (-1e3, 1e3),
    "presence_penalty": (-1e3, 1e3),
}
"""The least and the greatest value of each sampling parameter that logits stay finite under."""


def check_request(request: EngineRequest, *, vocab_size: int, max_model_len: int, block_size: int) -> None:
    """Refuse a request that could never run, or that contradicts itself.

    Raises:
        RequestTooLong: it can never fit.
        EngineError: anything else, with the value that is wrong.
    """
    name = f"request {request.request_id!r}"
    prompt, drawn = len(request.prompt_token_ids), len(request.output_token_ids)
    if prompt == 0 or request.max_tokens <= drawn:
        raise EngineError(
            f"{name} has {prompt} prompt tokens and {drawn} of at most {request.max_tokens} output tokens; there is "
            "nothing to draw"
        )
    if prompt + request.max_tokens > max_model_len:
        raise RequestTooLong(prompt, request.max_tokens, max_model_len)
    for tokens in (request.prompt_token_ids, request.output_token_ids):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise EngineError(
                f"{name} has tokens from {min(tokens)} to {max(tokens)}; the model's are 0 to {vocab_size - 1}"
            )
    _check_sampling(name, request.sampling)
    if request.load is not None and request.table is None:
        held = prompt + drawn
    else:
        ids = [] if request.table is None else list(request.table.groups.values())
        held = min((len(one) for one in ids if one), default=0) * block_size
    if not 0 <= request.computed_tokens <= min(held, prompt + drawn - 1):
        raise EngineError(
            f"{name} claims {request.computed_tokens} computed tokens; its blocks hold {held}, and one of its "
            f"{prompt + drawn} tokens has to be computed here"
        )


def _check_sampling(name: str, sampling: SamplingParams) -> None:
    for parameter, (least, greatest) in RANGES.items():
        value = getattr(sampling, parameter)
        if not least <= value <= greatest:  # NaN neither
            raise EngineError(f"{name} has {parameter} {value}; it must be within {least:g} and {greatest:g}")
