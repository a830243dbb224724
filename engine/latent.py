"""Multi-head latent attention over pages that hold the latent: what all heads' keys and values are projected from.

The library projects the latents of all tokens up in every step. The same scores come from projecting the query down
(DeepSeek-V2, 2024, section 2.1.2: the up-projections are absorbed): a row of the cache, latent then rotary key, is one
key that all heads share, and its latent is the value. So attention reads one narrow row per token, and what comes out
is projected up once for each query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class LatentProjection:
    """The up-projection of one layer, split by heads: `keys` [heads, key dim, latent], `values` [heads, latent, value
    dim]. Rotary parts are not projected."""

    def __init__(self, weight: torch.Tensor, key_dim: int, value_dim: int) -> None:
        by_head = weight.detach().view(-1, key_dim + value_dim, weight.shape[-1])
        self.latent_dim = weight.shape[-1]
        self._key_dim = key_dim
        self._keys = by_head[:, :key_dim].contiguous()
        self._values = by_head[:, key_dim:].transpose(1, 2).contiguous()

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """[heads, tokens, key dim + rotary] to [heads, tokens, latent + rotary]."""
        plain, rotary = query[..., : self._key_dim], query[..., self._key_dim :]
        return torch.cat((plain @ self._keys, rotary), dim=-1)

    def output(self, output: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, latent] to [tokens, heads, value dim]."""
        return (output.transpose(0, 1) @ self._values).transpose(0, 1)


def absorb(model: nn.Module) -> int:
    """Have every layer of latent attention hand over latents instead of keys and values; returns how many there are.

    The up-projection of such a layer goes into its `latent`.
    """
    found: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
    for module in found:
        module.latent = LatentProjection(module.kv_b_proj.weight, module.qk_nope_head_dim, module.v_head_dim)
        module.kv_b_proj = None
        module.expand_kv = _as_one_row
    return len(found)


def _as_one_row(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, 1, tokens, dim] each, to one key and a value of no elements."""
    return torch.cat((latent, rotary), dim=-1), latent[..., :0]
