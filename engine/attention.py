"""Attention over pages, behind the library's attention interface.

Keys and values of the step's tokens are written into their pages, then each sequence reads its own. The library says
with every call how this layer attends; what was found in its configuration before it was loaded is held against that,
and whatever is not known here is refused rather than left out.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from engine import attention_native, attention_torch
from engine.errors import ModelError
from engine.kernels.attention import PagedSequences
from engine.latent import LatentProjection
from engine.layers import Attention

ATTENTION = "kvferry_paged"

IGNORED = frozenset({"dropout", "output_router_logits", "position_ids", "use_cache"})
"""What the library hands on and nothing here needs: dropout and the losses of routers belong to training,
positions are in the keys already, and this is the cache."""


class PagedLayer(Protocol):
    """The pages of one layer in a step: `pages` [blocks, heads, tokens, content] with any strides, content being key
    then value; `blocks` and `offsets` say where each token's are written."""

    @property
    def layer(self) -> Attention: ...
    @property
    def pages(self) -> torch.Tensor: ...
    @property
    def sequences(self) -> PagedSequences: ...
    @property
    def blocks(self) -> torch.Tensor: ...
    @property
    def offsets(self) -> torch.Tensor: ...


class Paged(Protocol):
    """A step, as attention sees it."""

    def attention(self, layer: int) -> PagedLayer:
        """The pages of a layer."""
        ...

    def written(self, layer: int) -> None:
        """Hear that the KV of the step's tokens lies in the pages of a layer."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: Paged,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One layer of a ragged batch.

    `query` is [1, heads, tokens, key dim], `key` and `value` [1, KV heads, tokens, dim]; of a layer of latent attention
    (`engine.latent`) `key` is a token's one row, and `value` empty. Returns [1, tokens, heads, value dim]. `paged`
    travels through the library's keyword arguments.

    Raises:
        ModelError: the library asks for attention of another kind than its configuration said, or of one unknown here.
    """
    index = int(module.layer_idx)  # type: ignore[arg-type]
    unknown = sorted(name for name, one in others.items() if name not in IGNORED and one is not None)
    if unknown or attention_mask is not None:
        raise ModelError(f"the attention of layer {index} asks for {', '.join(unknown) or 'a mask'}, unknown here")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelError(f"the attention of layer {index} is not causal")
    here = paged.attention(index)
    window = here.layer.window if here.layer.kind == "window" else 0
    if (sliding_window or 0) != window:
        raise ModelError(f"layer {index} has a window of {sliding_window} tokens, its configuration said {window}")
    kernels = attention_native if attention_native.serves(here.pages) else attention_torch
    kernels.store(here.pages, key[0].transpose(0, 1), value[0].transpose(0, 1), here.blocks, here.offsets)
    paged.written(index)
    latent: LatentProjection | None = getattr(module, "latent", None)
    output = kernels.attend(
        here.pages,
        (query[0] if latent is None else latent.query(query[0])).transpose(0, 1),
        here.sequences,
        value_dim=value.shape[-1] if latent is None else latent.latent_dim,
        scaling=scaling,
        window=window,
        chunk=here.layer.window if here.layer.kind == "chunked" else 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return (output if latent is None else latent.output(output))[None], None


AttentionInterface.register(ATTENTION, paged_attention)
