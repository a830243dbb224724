"""Packed linear layers compute what plain ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.loading import load_model
from engine.prepack import PackedLinear, can_prepack, prepack
from tests.engine.tiny import make_tiny

needs_bf16 = pytest.mark.skipif(not can_prepack(), reason="this processor or torch cannot pack bfloat16")


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 16, 130])
def test_a_packed_layer_equals_the_plain_one(bias: bool, rows: int) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(96, 70, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    packed = PackedLinear(plain)
    inputs = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    torch.testing.assert_close(packed(inputs), plain(inputs), rtol=2e-2, atol=2e-2)
    assert packed(inputs).shape == (1, rows, 70)
    assert (packed.in_features, packed.out_features) == (96, 70)


@needs_bf16
def test_every_linear_layer_of_a_model_is_replaced(tmp_path_factory: pytest.TempPathFactory) -> None:
    tiny = make_tiny(tmp_path_factory.mktemp("packed"), "Qwen2ForCausalLM", torch.bfloat16)
    model = tiny.reference.requires_grad_(False)
    expected = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    count = sum(type(module) is nn.Linear for module in model.modules())
    assert prepack(model) == count == 2 * 7 + 1
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    packed = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    torch.testing.assert_close(packed, expected, rtol=5e-2, atol=5e-2 * float(expected.abs().max()))
    assert prepack(model) == 0


@needs_bf16
def test_nothing_of_the_file_stays_mapped(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, "LlamaForCausalLM", torch.bfloat16)
    model = load_model(tiny.info, torch.bfloat16)
    prepack(model)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_float32_stays_plain() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert prepack(model) == 0
    assert all(type(module) is nn.Linear for module in model)
