"""The tokens that end an answer, as a model folder names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError

FILES = ("generation_config.json", "config.json")


def stop_tokens(folder: Path) -> frozenset[int] | None:
    """By the rule of transformers' `generate`: what the generation config says, else the model's configuration. None
    where both are silent; then it is up to the tokenizer.

    Raises:
        ModelError: a file cannot be read, or what it names are not tokens.
    """
    for name in FILES:
        file = folder / name
        try:
            value: Any = json.loads(file.read_bytes()).get("eos_token_id") if file.is_file() else None
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
        if value is None:
            continue
        tokens = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in tokens):
            raise ModelError(f"{file} has eos_token_id {value!r}; it must be a token id or a list of them")
        return frozenset(tokens)
    return None
