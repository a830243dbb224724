"""Attention over pages, behind the library's attention interface.

Keys and values of the step's tokens are written into their pages; then each sequence reads its own pages, cut to its
true length. Nothing is masked that was never written: stale bits may be NaN, and `0 * NaN` is NaN, whatever the mask
says.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from engine.batch import Batch, Span

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
    """One layer of a ragged batch.

    `query` is [1, heads, tokens, head dim], `key` and `value` [1, KV heads, tokens, head dim]. Returns
    [1, tokens, heads, head dim]. `paged` travels through the library's keyword arguments.
    """
    pool = paged.pool
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    key_dim = key.shape[-1]
    pool.layers[layer][paged.blocks, :, paged.offsets] = torch.cat((key[0], value[0]), dim=-1).transpose(0, 1)
    paged.written(layer)
    rows = pool.rows[pool.layer_row(layer) :].index_select(0, paged.gather)
    num_heads = key.shape[1]
    outputs = []
    for span in paged.spans:
        pages = rows[span.first_row : span.last_row].view(num_heads, -1, key_dim + value.shape[-1])[:, : span.num_keys]
        queries = query[:, :, span.start : span.start + span.num_queries]
        outputs.append(_attend(queries, pages[None, :, :, :key_dim], pages[None, :, :, key_dim:], span, scaling))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, scaling: float | None
) -> torch.Tensor:
    if span.num_queries == 1:
        # Every key is visible: the heads that share a KV head become the rows of one query matrix.
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        grouped = query.reshape(1, num_kv_heads, num_heads // num_kv_heads, -1)
        output = F.scaled_dot_product_attention(grouped, key, value, scale=scaling)
        return output.reshape(1, num_heads, 1, -1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=span.mask, is_causal=span.mask is None, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(ATTENTION, paged_attention)
