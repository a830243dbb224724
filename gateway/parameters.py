"""How tokens are drawn and when drawing ends, as both endpoints read it from a request."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from gateway.errors import bad_request
from gateway.fields import Fields, is_integer, wrong
from rpc.v1 import common_pb2

MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
SEED_RANGE = (-(1 << 63), (1 << 64) - 1)
SEED_MASK = (1 << 64) - 1
TOKEN_ID_MAX = (1 << 32) - 1
TOKENS_MAX = (1 << 31) - 1
# Below this a number is 0 for all purposes, among them the wire's single precision.
SMALLEST = 1e-5


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """`temperature` 0 is greedy; `seed` has 64 bits."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float

    def to_proto(self) -> common_pb2.SamplingParams:
        """The message, field by field."""
        return common_pb2.SamplingParams(**msgspec.structs.asdict(self))


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for besides its prompt. `max_tokens` None is not said."""

    sampling: Sampling
    max_tokens: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    stream: bool
    include_usage: bool
    return_token_ids: bool


def read_parameters(fields: Fields, max_tokens_names: tuple[str, ...]) -> Parameters:
    """Everything but model and prompt. `max_tokens_names` are the fields that bound the answer.

    Raises:
        ApiError: 400, naming the field and its value.
    """
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    if n != 1:
        raise bad_request(f"n must be 1, got {n}; several choices are not supported yet", "n", "unsupported_parameter")
    stream = fields.boolean("stream", False)
    return Parameters(
        sampling=_read_sampling(fields),
        max_tokens=_read_max_tokens(fields, max_tokens_names),
        stop_strings=_read_stop_strings(fields),
        stop_token_ids=frozenset(read_token_ids("stop_token_ids", fields.values.get("stop_token_ids") or [])),
        stream=stream,
        include_usage=_read_include_usage(fields, stream),
        return_token_ids=fields.boolean("return_token_ids", False),
    )


def read_token_ids(param: str, value: object) -> list[int]:
    """A list of token ids; whether the model has them is known later."""
    if not isinstance(value, list):
        raise wrong(param, value, "a list of token ids")
    for index, token_id in enumerate(value):
        if not is_integer(token_id) or not 0 <= token_id <= TOKEN_ID_MAX:
            raise wrong(f"{param}[{index}]", token_id, "a token id")
    return value


def _read_sampling(fields: Fields) -> Sampling:
    temperature = fields.number("temperature", 1.0, 0.0, 2.0)
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p < SMALLEST or temperature < SMALLEST:
        # The limit of both is the most likely token, always.
        temperature, top_p = 0.0, 1.0
    # -1 is another way to say that nothing is cut off.
    top_k = max(0, fields.integer("top_k", 0, -1, TOKENS_MAX) or 0)
    seed = fields.integer("seed", None, *SEED_RANGE)
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        # Without a seed one is drawn: equal requests are meant to give different answers.
        seed=secrets.randbits(64) if seed is None else seed & SEED_MASK,
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
    )


def _read_max_tokens(fields: Fields, names: tuple[str, ...]) -> int | None:
    given = {name: fields.integer(name, None, 1, TOKENS_MAX) for name in names}
    values = {value for value in given.values() if value is not None}
    if len(values) > 1:
        said = " and ".join(f"{name} {value}" for name, value in given.items())
        raise bad_request(f"{said} contradict each other; give one of them", names[-1])
    return values.pop() if values else None


def _read_stop_strings(fields: Fields) -> tuple[str, ...]:
    value: Any = fields.values.get("stop")
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    acceptable = isinstance(strings, list) and all(isinstance(string, str) and string for string in strings)
    if not acceptable or len(strings) > MAX_STOP_STRINGS:
        raise fields.wrong("stop", f"a non-empty string or a list of up to {MAX_STOP_STRINGS} of them")
    return tuple(strings)


def _read_include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    for name in options.values:
        if name not in ("include_usage", "include_obfuscation"):
            raise bad_request(
                f"unrecognized stream option {name[:80]!r}", options.param(name[:80]), "unknown_parameter"
            )
    options.boolean("include_obfuscation", False)
    return options.boolean("include_usage", False)
