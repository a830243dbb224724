"""Attention over pages by the engine's own kernels, on a CPU; it computes what `engine.attention_torch` does."""

from __future__ import annotations

import torch

from engine import _native
from engine.kernels.attention import PagedSequences

DTYPES = (torch.bfloat16, torch.float32)


def serves(pages: torch.Tensor) -> bool:
    """Whether the kernels can read pages [blocks, heads, tokens, content] where they lie."""
    return pages.device.type == "cpu" and pages.dtype in DTYPES and pages.stride(3) == 1


def store(
    pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Write each token's key and value into its page: see `engine.attention_torch.store`."""
    key, value = _with_rows(key, pages.dtype), _with_rows(value, pages.dtype)
    _native.store(
        pages=_pages(pages, key.shape[2], value.shape[2]),
        key=key.data_ptr(),
        key_token_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value=value.data_ptr(),
        value_token_stride=value.stride(0),
        value_head_stride=value.stride(1),
        stored_value_dim=value.shape[2],
        blocks=blocks.data_ptr(),
        offsets=offsets.data_ptr(),
        tokens=key.shape[0],
        kv_heads=key.shape[1],
    )


def attend(
    pages: torch.Tensor,
    query: torch.Tensor,
    sequences: PagedSequences,
    *,
    value_dim: int,
    scaling: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch: see `engine.attention_torch.attend`."""
    query = _with_rows(query, pages.dtype)
    num_tokens, num_heads, key_dim = query.shape
    output = query.new_empty(num_tokens, num_heads, value_dim)
    scores = None if sinks is None else sinks.float().contiguous()
    _native.attend(
        pages=_pages(pages, key_dim, value_dim),
        sequences=_native.Sequences(
            tables=sequences.tables.data_ptr(),
            table_width=sequences.tables.stride(0),
            first_keys=sequences.first_keys.data_ptr(),
            lengths=sequences.lengths.data_ptr(),
            query_starts=sequences.query_starts.data_ptr(),
            count=sequences.tables.shape[0],
            block_size=pages.shape[2],
        ),
        query=query.data_ptr(),
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        output=output.data_ptr(),
        sinks=0 if scores is None else scores.data_ptr(),
        kv_heads=pages.shape[1],
        heads_per_kv=num_heads // pages.shape[1],
        scaling=scaling,
        softcap=softcap,
        window=window,
        chunk=chunk,
    )
    return output


def _with_rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the pages' type, the last dimension contiguous."""
    tensor = tensor.to(dtype)
    return tensor if tensor.shape[-1] == 0 or tensor.stride(-1) == 1 else tensor.contiguous()


def _pages(pages: torch.Tensor, key_dim: int, value_dim: int) -> _native.Pages:
    content = pages.shape[-1]
    if content not in (key_dim, key_dim + value_dim):
        raise ValueError(f"pages with a content of {content} hold no keys of {key_dim} and values of {value_dim}")
    return _native.Pages(
        data=pages.data_ptr(),
        block_stride=pages.stride(0),
        head_stride=pages.stride(1),
        token_stride=pages.stride(2),
        key_dim=key_dim,
        value_dim=value_dim,
        value_start=key_dim if content > key_dim else 0,
        bfloat16=pages.dtype is torch.bfloat16,
    )
