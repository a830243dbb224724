"""Latent attention: scores and values of projected-up latents, without projecting them up."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from engine.latent import LatentProjection, absorb
from engine.loading import load_model
from tests.engine.tiny import Tiny, make_tiny

HEADS, KEY, ROTARY, VALUE, LATENT, TOKENS = 3, 6, 4, 5, 7, 9


def test_absorbed_projections_compute_the_same_attention() -> None:
    torch.manual_seed(0)
    up = nn.Linear(LATENT, HEADS * (KEY + VALUE), bias=False)
    latents, rotary = torch.randn(TOKENS, LATENT), torch.randn(TOKENS, ROTARY)
    query = torch.randn(HEADS, TOKENS, KEY + ROTARY)

    keys, values = up(latents).view(TOKENS, HEADS, KEY + VALUE).transpose(0, 1).split([KEY, VALUE], dim=-1)
    keys = torch.cat((keys, rotary.expand(HEADS, -1, -1)), dim=-1)
    expected = (query @ keys.transpose(1, 2)).softmax(dim=-1) @ values

    projection = LatentProjection(up.weight, KEY, VALUE)
    rows = torch.cat((latents, rotary), dim=-1)
    weights = (projection.query(query) @ rows.T).softmax(dim=-1)
    found = projection.output((weights @ latents).transpose(0, 1))
    torch.testing.assert_close(found.transpose(0, 1), expected)
    assert projection.latent_dim == LATENT


def test_a_loaded_model_hands_over_rows_and_keeps_no_up_projection(tmp_path: Path) -> None:
    tiny: Tiny = make_tiny(tmp_path, "DeepseekV3ForCausalLM")
    model = load_model(tiny.info, torch.float32)
    for layer in model.model.layers:
        attention = layer.self_attn
        assert attention.kv_b_proj is None
        key, value = attention.expand_kv(torch.ones(1, 1, 3, 20), torch.zeros(1, 1, 3, 8))
        assert key.shape == (1, 1, 3, 28)
        assert value.shape == (1, 1, 3, 0)
    assert tiny.info.layers[0].attention is not None
    assert (tiny.info.layers[0].attention.kind, tiny.info.layers[0].attention.key_dim) == ("latent", 28)


def test_other_models_have_nothing_to_absorb(llama: Tiny) -> None:
    assert absorb(llama.reference) == 0
