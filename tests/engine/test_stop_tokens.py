"""Which tokens end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.stop_tokens import stop_tokens


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 0]}, {"eos_token_id": 2}, {2, 0}),
        ({"eos_token_id": None}, {"eos_token_id": 0}, {0}),
        (None, {"eos_token_id": 7}, {7}),
        ({"eos_token_id": 5}, None, {5}),
        ({"eos_token_id": []}, {"eos_token_id": 2}, set()),
        ({}, {}, None),
        (None, None, None),
    ],
)
def test_the_generation_config_goes_before_the_models(
    generation: Any, config: Any, expected: set[int] | None, tmp_path: Path
) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert stop_tokens(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "generation_config.json cannot be read"),
        ("[]", "generation_config.json cannot be read"),
        ('{"eos_token_id": "</s>"}', "has eos_token_id '</s>'; it must be a token id or a list of them"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        stop_tokens(tmp_path)
