"""Sampling parameters on the wire and in the engine."""

from __future__ import annotations

from engine import SamplingParams
from rpc.v1 import common_pb2


def from_message(message: common_pb2.SamplingParams) -> SamplingParams:
    """The engine's parameters of a request."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
    )
