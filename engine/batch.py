"""One step's tokens as tensors: a ragged batch, sequence after sequence, without padding.

Whatever the layers of a group have in common is computed here once: where new tokens are written, which blocks each
sequence reads. What does not change from step to step, a sequence's block ids as an array, stays with its table.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.attention import PagedSequences
from engine.layers import Attention
from engine.rows import Row
from engine.scheduler import Scheduled

if TYPE_CHECKING:
    from engine.blocks import BlockTable
    from engine.groups import CacheGroup
    from engine.pool import PagePool
    from engine.request import OnLayer


class GroupStep(msgspec.Struct, frozen=True):
    """What a step does in one group of attention: `blocks` and `offsets` say where each token's KV is written."""

    sequences: PagedSequences
    blocks: torch.Tensor
    offsets: torch.Tensor


class LayerStep(msgspec.Struct, frozen=True):
    """What a step does in one layer of attention. `pages` is [blocks, heads, tokens, content]."""

    pages: torch.Tensor
    layer: Attention
    sequences: PagedSequences
    blocks: torch.Tensor
    offsets: torch.Tensor


class Span(msgspec.Struct, frozen=True):
    """Tokens of one sequence, from position `begin` on; logits are wanted after the last `num_rows` of them."""

    table: BlockTable
    begin: int
    token_ids: list[int]
    num_rows: int


class Batch(msgspec.Struct, frozen=True):
    """`token_ids` and `positions` are [1, tokens]. `layers` are by the model's own numbers. `logits_rows` are the
    tokens after which logits are wanted.

    `before` is called before a layer's pages are read, each of `on_layer` when this step's KV lies in them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    layers: dict[int, LayerStep]
    logits_rows: torch.Tensor
    on_layer: list[Callable[[int], None]]
    before: Callable[[int], None] | None

    def attention(self, layer: int) -> LayerStep:
        """What this step does in a layer of attention; its pages may be read and written from here on."""
        if self.before is not None:
            self.before(layer)
        return self.layers[layer]

    def written(self, layer: int) -> None:
        """The KV of this step's tokens lies in the pages of a layer."""
        for tell in self.on_layer:
            tell(layer)


def build_batch(
    pool: PagePool,
    groups: Many[CacheGroup],
    step: Many[Scheduled],
    before: Callable[[int], None] | None = None,
) -> tuple[Batch, list[Row]]:
    """The tensors of a step, and whose token is drawn from each row of its logits. Every sequence has the blocks for
    its tokens."""
    spans: list[Span] = []
    rows: list[Row] = []
    on_layer: list[Callable[[int], None]] = []
    for one in step:
        sequence, table = one.sequence, one.sequence.table
        assert table is not None
        begin, end = sequence.computed, sequence.computed + one.num_tokens
        drafts = tuple(sequence.drafts[: one.num_drafts])
        num_rows = 1 + one.num_drafts if end == len(sequence.tokens) else 0
        spans.append(Span(table, begin, [*sequence.tokens[begin:end], *drafts], num_rows))
        rows += [Row(sequence, drafts[:count]) for count in range(num_rows)]
        if sequence.request.on_layer is not None:
            on_layer.append(_teller(sequence.request.on_layer, table, end))
    return build_spans(pool, groups, spans, on_layer=on_layer, before=before), rows


def build_spans(
    pool: PagePool,
    groups: Many[CacheGroup],
    spans: Many[Span],
    first_layer: int = 0,
    *,
    on_layer: Many[Callable[[int], None]] = (),
    before: Callable[[int], None] | None = None,
) -> Batch:
    """The tensors of a ragged batch over `groups`, those of the model whose layers are numbered from `first_layer`."""
    begins = np.array([span.begin for span in spans], dtype=np.int64)
    counts = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
    ends = begins + counts
    starts = np.zeros(len(spans) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    of_sequence = np.repeat(np.arange(len(spans)), counts)
    positions = np.arange(starts[-1]) - (starts[:-1] - begins)[of_sequence]
    query_starts = torch.from_numpy(starts.astype(np.int32))
    lengths = torch.from_numpy(ends.astype(np.int32))

    layers: dict[int, LayerStep] = {}
    for group in groups:
        assert group.attention is not None  # no family with recurrent states is served
        found = _group_step(pool, group, spans, begins, ends, positions, of_sequence, lengths, query_starts)
        for layer in group.spec.layers:
            layers[layer - first_layer] = LayerStep(
                pool.pages[layer], group.attention, found.sequences, found.blocks, found.offsets
            )
    logits_rows = [
        row for end, span in zip(starts[1:].tolist(), spans, strict=True) for row in range(end - span.num_rows, end)
    ]
    return Batch(
        token_ids=torch.tensor([[token for span in spans for token in span.token_ids]]),
        positions=torch.from_numpy(positions)[None],
        layers=layers,
        logits_rows=torch.tensor(logits_rows, dtype=torch.long),
        on_layer=list(on_layer),
        before=before,
    )


def _group_step(
    pool: PagePool,
    group: CacheGroup,
    spans: Many[Span],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    of_sequence: npt.NDArray[np.int64],
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
) -> GroupStep:
    size = pool.geometry.block_size
    first_visible = group.kind.first_visible
    if group.kind.drops:
        first = np.array([first_visible(begin) // size for begin in begins.tolist()], dtype=np.int64)
    else:
        first = np.zeros(len(spans), dtype=np.int64)
    end = -(-ends // size)
    tables = np.zeros((len(spans), int((end - first).max())), dtype=np.int32)
    for row, (span, low, high) in enumerate(zip(spans, first.tolist(), end.tolist(), strict=True)):
        tables[row, : high - low] = span.table.array(group.name, high)[low:high]
    columns = positions // size - first[of_sequence]
    return GroupStep(
        PagedSequences(
            tables=torch.from_numpy(tables),
            first_keys=torch.from_numpy((first * size).astype(np.int32)),
            lengths=lengths,
            query_starts=query_starts,
        ),
        blocks=torch.from_numpy(tables[of_sequence, columns].astype(np.int64)),
        offsets=torch.from_numpy(positions % size),
    )


def _teller(on_layer: OnLayer, table: BlockTable, num_tokens: int) -> Callable[[int], None]:
    return lambda layer: on_layer(table, layer, num_tokens)
