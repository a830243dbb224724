"""Attention over pages in plain torch: for devices and layouts without a kernel, and what kernels are tested against.

Each sequence reads its own pages, cut to its true length. Nothing is masked that was never written: stale bits may be
NaN, and `0 * NaN` is NaN, whatever the mask says.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.attention import PagedSequences


def store(
    pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Write each token's key and value into its page.

    `pages` is [blocks, heads, tokens, content] with any strides, content being key then value. `key` is
    [T, heads, key dim], `value` [T, heads, value dim] (0 wide in a latent cache). Token t goes to offset `offsets[t]`
    of block `blocks[t]`.
    """
    pages[blocks, :, offsets] = torch.cat((key, value), dim=-1)


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
    """Causal attention of a ragged batch; `query` is [T, heads, key dim], the result [T, heads, value dim].

    A query at position q sees the keys p with p <= q that the sequence still has, with a `window` those with
    p > q - window, with a `chunk` those with p >= q // chunk * chunk. Scores are scaled, then (`softcap` > 0) bent to
    softcap * tanh(score / softcap); `sinks` [heads] are scores of one more key each, which has no value.

    Where the content of a page is only as wide as a key, the value is the first `value_dim` elements of the key.

    Raises:
        ValueError: the content is neither a key nor a key and a value.
    """
    key_dim, content = query.shape[-1], pages.shape[-1]
    if content not in (key_dim, key_dim + value_dim):
        raise ValueError(f"pages with a content of {content} hold no keys of {key_dim} and values of {value_dim}")
    value_start = key_dim if content > key_dim else 0
    by_head, block_size = pages.transpose(0, 1), pages.shape[2]
    output = query.new_empty(query.shape[0], query.shape[1], value_dim)
    starts = sequences.query_starts.tolist()
    spans = zip(sequences.first_keys.tolist(), sequences.lengths.tolist(), starts, starts[1:], strict=False)
    for row, (first_key, length, begin, end) in enumerate(spans):
        first_query = length - (end - begin)
        oldest = _oldest(first_query, first_key, window, chunk)
        first_block = (oldest - first_key) // block_size
        table = sequences.tables[row, first_block : -(-(length - first_key) // block_size)]
        skipped = first_key + first_block * block_size
        keys = by_head.index_select(1, table).flatten(1, 2)[:, oldest - skipped : length - skipped]
        mask = _mask(first_query, length, oldest, window, chunk)
        value = keys[..., value_start : value_start + value_dim]
        output[begin:end] = _attend(
            query[begin:end].transpose(0, 1), keys[..., :key_dim], value, mask, scaling, softcap, sinks
        ).transpose(0, 1)
    return output


def _oldest(query: int, first_key: int, window: int, chunk: int) -> int:
    """The oldest key that a query sees, and with it every later one."""
    return max(first_key, query - window + 1 if window else 0, query // chunk * chunk if chunk else 0)


def _mask(first_query: int, length: int, oldest: int, window: int, chunk: int) -> torch.Tensor | None:
    """[queries, keys from the oldest on]: which are visible; None where all are."""
    if length - first_query == 1:
        return None
    queries = torch.arange(first_query, length)[:, None]
    keys = torch.arange(oldest, length)
    mask = keys <= queries
    if window:
        mask &= keys > queries - window
    if chunk:
        mask &= keys >= queries // chunk * chunk
    return mask


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence: `query` [heads, queries, dim], `key` and `value` [KV heads, keys, dim]."""
    num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[0]
    if softcap or sinks is not None:
        return _attend_by_scores(query, key, value, mask, scaling, softcap, sinks)
    if num_queries == 1:
        # Every key is visible: the heads that share a KV head become the rows of one query matrix.
        query = query.reshape(num_kv_heads, num_heads // num_kv_heads, -1)
        output = F.scaled_dot_product_attention(query[None], key[None], value[None], scale=scaling)
        return output.reshape(num_heads, 1, -1)
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=scaling, enable_gqa=True
    )[0]


def _attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What torch's own attention cannot do; the softmax is computed in float32."""
    num_heads, num_queries, _ = query.shape
    num_kv_heads, num_keys, _ = key.shape
    query = query.reshape(num_kv_heads, -1, query.shape[-1])
    scores = (query @ key.transpose(1, 2)).view(num_heads, num_queries, num_keys).float() * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, num_queries, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys].to(value.dtype)
    output = weights.reshape(num_kv_heads, -1, num_keys) @ value
    return output.reshape(num_heads, num_queries, -1)
