"""Settings that make no sense are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine import EngineConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("kv_cache_bytes", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", -1),
        ("compute_threads", 0),
        ("max_model_len", -1),
        ("layout", "LBNCH"),
    ],
)
def test_the_message_names_the_setting_and_its_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"engine.{name} is {value!r}; it must be"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("settings", [{"blocksize": 16}, {"dtype": "float16"}, {"block_size": "16"}])
def test_unknown_names_and_kinds_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, EngineConfig)
