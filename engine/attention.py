"""Attention over pages, behind the library's attention interface.

Keys and values of the step's tokens are written into their pages; then each sequence reads its own pages, cut to its
true length. Nothing is masked that was never written: stale bits may be NaN, and `0 * NaN` is NaN, whatever the mask
says.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from engine.batch import Batch
from engine.kernels.attention import attend, store

ATTENTION = "kvferry_paged"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: Batch,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One layer of a ragged batch."""
    layer = int(module.layer_idx)
    step = paged.attention(layer)
    store(step.pages, key[0].transpose(0, 1), value[0].transpose(0, 1), step.blocks, step.offsets)
    paged.written(layer)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    out = attend(
        step.pages,
        query[0].transpose(0, 1),
        step.sequences,
        value_dim=value.shape[-1],
        scaling=scaling,
        window=step.layer.window,
    )
    return out[None], None


AttentionInterface.register(ATTENTION, paged_attention)
