"""What is fused computes what the library's modules do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from engine import _native
from engine.fused import FusedGatedUnit, FusedNorm, fuse
from tests.engine.tiny import MODEL_TYPES, make_tiny

NORMS = [LlamaRMSNorm, DeepseekV3RMSNorm, Gemma2RMSNorm, Gemma3RMSNorm, GptOssRMSNorm, Olmo2RMSNorm]


def within_a_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for last places of bfloat16, in few elements: two roundings may each fall otherwise."""
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-6)
    assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("width", [5, 64, 576])
def test_a_norm(isa: str, kind: type[nn.Module], width: int, kernels: None) -> None:
    _native.use_isa(isa)
    torch.manual_seed(width)
    norm: Any = kind(width, eps=1e-3).to(torch.bfloat16).requires_grad_(False)
    norm.weight.copy_(torch.randn(width))
    model = nn.Sequential(norm)
    rows = (torch.randn(1, 130, width) * 3).to(torch.bfloat16)
    expected = model(rows)
    assert fuse(model) == 1
    assert type(model[0]) is FusedNorm
    within_a_rounding(model(rows), expected)
    # A view with gaps, as a query's heads are.
    heads = rows[:, :128].view(1, 32, 4, width).transpose(1, 2)
    within_a_rounding(model(heads), norm(heads))


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_unit(isa: str, bias: bool, kernels: None) -> None:
    _native.use_isa(isa)
    torch.manual_seed(0)
    unit = LlamaMLP(LlamaConfig(hidden_size=24, num_attention_heads=4, intermediate_size=52, mlp_bias=bias))
    model = nn.Sequential(unit.to(torch.bfloat16).requires_grad_(False))
    rows = (torch.randn(1, 130, 24) * 5).to(torch.bfloat16)
    expected = model(rows)
    assert fuse(model) == 1
    assert type(model[0]) is FusedGatedUnit
    torch.testing.assert_close(model(rows), expected, rtol=2**-6, atol=2**-6)


def test_what_is_not_known_stays() -> None:
    class OtherRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
        """Perhaps it computes something else."""

    class Gelu(LlamaMLP):  # type: ignore[misc]
        """A unit that is not gated by silu."""

    Gelu.__name__ = "LlamaMLP"
    wide: Any = LlamaRMSNorm(8)  # float32 among bfloat16
    model = nn.Sequential(
        OtherRMSNorm(8).to(torch.bfloat16), wide, Gelu(LlamaConfig(hidden_act="gelu")).to(torch.bfloat16)
    )
    assert fuse(model) == 0


@pytest.mark.parametrize("architecture", sorted(MODEL_TYPES))
def test_every_family_computes_the_same(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tiny = make_tiny(tmp_path_factory.mktemp("fused"), architecture, torch.bfloat16)
    model = tiny.reference.requires_grad_(False)
    tokens = torch.tensor([[1, 2, 3, 50, 7]])
    expected = model(input_ids=tokens).logits.float()
    fuse(model)
    found = model(input_ids=tokens).logits.float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 * float(expected.abs().max()))
