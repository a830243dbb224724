"""Packed linear layers compute what plain ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine import _native
from engine.loading import load_model
from engine.prepack import OneDnnLinear, PackedLinear, onednn_packs, packed_linear, prepack
from tests.engine.tiny import make_tiny

needs_onednn = pytest.mark.skipif(not onednn_packs(), reason="this processor or torch has no bfloat16 in oneDNN")


def check(kind: type[nn.Module], inputs: int, outputs: int, rows: int, *, bias: bool) -> None:
    """Within one rounding of the sum in float32."""
    torch.manual_seed(rows)
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    packed: Any = kind(plain)
    given = torch.randn(1, rows, inputs, dtype=torch.bfloat16)
    expected = nn.functional.linear(
        given.float(), plain.weight.float(), plain.bias.float() if plain.bias is not None else None
    )
    found = packed(given)
    assert found.dtype is torch.bfloat16
    assert found.shape == (1, rows, outputs)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-3)
    assert (packed.in_features, packed.out_features) == (inputs, outputs)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 16, 97, 130])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 70), (64, 16), (33, 17), (1, 1), (576, 192)])
def test_a_packed_layer_equals_the_plain_one(
    isa: str, bias: bool, rows: int, inputs: int, outputs: int, kernels: None
) -> None:
    _native.use_isa(isa)
    check(PackedLinear, inputs, outputs, rows, bias=bias)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 16, 130])
def test_a_layer_packed_by_onednn_equals_the_plain_one(bias: bool, rows: int) -> None:
    check(OneDnnLinear, 96, 70, rows, bias=bias)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_a_layer(threads: int, kernels: None) -> None:
    _native.use_threads(threads)
    for _ in range(20):
        check(PackedLinear, 256, 4096, 7, bias=True)


def test_a_layer_of_no_rows_gives_none(kernels: None) -> None:
    layer = PackedLinear(nn.Linear(8, 4, dtype=torch.bfloat16))
    assert layer(torch.empty(0, 8, dtype=torch.bfloat16)).shape == (0, 4)


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


def test_nothing_of_the_file_stays_mapped(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, "LlamaForCausalLM", torch.bfloat16)
    model = load_model(tiny.info, torch.bfloat16)
    prepack(model)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_the_way_of_packing_follows_the_processor() -> None:
    assert type(packed_linear(nn.Linear(4, 4, dtype=torch.bfloat16))) is (
        OneDnnLinear if onednn_packs() else PackedLinear
    )


def test_float32_stays_plain() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert prepack(model) == 0
    assert all(type(module) is nn.Linear for module in model)
