"""One step's tokens as tensors: a ragged batch, sequence after sequence, without padding.

Whatever the layers have in common is computed here once: where new tokens are written, which pages each sequence reads,
how its queries see its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from engine.scheduler import Scheduled

if TYPE_CHECKING:
    from engine.blocks import BlockTable
    from engine.pool import PagePool
    from engine.request import OnLayer


class Span(msgspec.Struct, frozen=True):
    """One sequence in the batch: tokens `start` to `start + num_queries`, which see `num_keys` keys.

    Its pages are rows `first_row` to `last_row` of what `gather` finds. `mask` is [queries, keys] where some but not
    all keys are visible to some query and the library's causal rule does not apply.
    """

    start: int
    num_queries: int
    num_keys: int
    first_row: int
    last_row: int
    mask: torch.Tensor | None


class Batch(msgspec.Struct, frozen=True):
    """`token_ids` and `positions` are [1, tokens]; `blocks` and `offsets` say where each token's KV is written.

    `on_layer` are those who want to hear that a layer's KV has been written.
    `gather` are the rows of `PagePool.rows` (for layer 0) of all sequences' pages, head by head, so that a sequence's
    rows are [heads, blocks]. `logits_rows` are the tokens after which a token is drawn, one for each of `drawing`.
    """

    pool: PagePool
    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    gather: torch.Tensor
    spans: list[Span]
    logits_rows: torch.Tensor
    drawing: list[Scheduled]
    on_layer: list[Callable[[int], None]]

    def written(self, layer: int) -> None:
        """The KV of this step's tokens lies in the pages of a layer."""
        for tell in self.on_layer:
            tell(layer)


def build_batch(pool: PagePool, step: Many[Scheduled]) -> Batch:
    """The tensors of a step; every sequence in it has the blocks for its tokens."""
    block_size = pool.geometry.block_size
    num_heads = pool.group.num_kv_heads
    block_rows = len(pool.group.layers) * num_heads
    heads = np.arange(num_heads, dtype=np.int64)[:, None]
    token_ids: list[int] = []
    positions, blocks, gather = [], [], []
    spans: list[Span] = []
    logits_rows: list[int] = []
    drawing: list[Scheduled] = []
    on_layer: list[Callable[[int], None]] = []
    row = 0
    for scheduled in step:
        sequence, num_tokens = scheduled.sequence, scheduled.num_tokens
        assert sequence.table is not None
        begin, end = sequence.computed, sequence.computed + num_tokens
        num_blocks = -(-end // block_size)
        table = np.array(sequence.table.block_ids[:num_blocks], dtype=np.int64)
        where = np.arange(begin, end, dtype=np.int64)
        start = len(token_ids)
        token_ids += sequence.tokens[begin:end]
        positions.append(where)
        blocks.append(table[where // block_size])
        gather.append((table * block_rows + heads).ravel())
        spans.append(Span(start, num_tokens, end, row, row + num_heads * num_blocks, _mask(num_tokens, end)))
        row += num_heads * num_blocks
        if sequence.request.on_layer is not None:
            on_layer.append(_teller(sequence.request.on_layer, sequence.table, end))
        if end == len(sequence.tokens):
            logits_rows.append(len(token_ids) - 1)
            drawing.append(scheduled)
    flat = np.concatenate(positions)
    return Batch(
        pool=pool,
        token_ids=torch.tensor([token_ids]),
        positions=torch.from_numpy(flat)[None],
        blocks=torch.from_numpy(np.concatenate(blocks)),
        offsets=torch.from_numpy(flat % block_size),
        gather=torch.from_numpy(np.concatenate(gather)),
        spans=spans,
        logits_rows=torch.tensor(logits_rows, dtype=torch.long),
        drawing=drawing,
        on_layer=on_layer,
    )


def _teller(on_layer: OnLayer, table: BlockTable, num_tokens: int) -> Callable[[int], None]:
    return lambda layer: on_layer(table, layer, num_tokens)


def _mask(num_queries: int, num_keys: int) -> torch.Tensor | None:
    if num_queries in (1, num_keys):
        return None
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
