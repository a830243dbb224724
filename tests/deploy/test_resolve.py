"""What a cluster cannot serve is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.errors import ModelRefused
from deploy.model.resolve import ResolvedModel, inspect
from tests.tiny_model import save_tiny_model


def resolved(path: Path) -> ResolvedModel:
    return ResolvedModel(path=path, served_name="tiny")


def test_a_tiny_llama_passes(tmp_path: Path) -> None:
    inspect(resolved(save_tiny_model(tmp_path)))


def test_windows_are_refused_with_their_size(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64)
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelRefused, match="windows of 64 tokens"):
        inspect(resolved(tmp_path))
