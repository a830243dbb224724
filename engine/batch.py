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
from engine.recurrent.step import StateStep
from engine.sampler import Row
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


class Batch(msgspec.Struct, frozen=True):
    """`token_ids` and `positions` are [1, tokens]. `states` says which slots hold the sequences' recurrent states.

    `logits_rows` are the tokens after which a token is drawn, one for each of `rows`. `before` is called before a
    layer's pages are read, `written` when this step's KV lies in them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    layers: dict[int, LayerStep]
    states: StateStep | None
    logits_rows: torch.Tensor
    rows: list[Row]
    on_layer: list[Callable[[int], None]]
    before: Callable[[int], None] | None = None

    def attention(self, layer: int) -> LayerStep:
        """What this step does in a layer of attention; its pages may be read and written from here on."""
        if self.before is not None:
            self.before(layer)
        return self.layers[layer]

    def written(self, layer: int) -> None:
        """The KV of this step's tokens lies in the pages of a layer."""
        for tell in self.on_layer:
            tell(layer)


def build_batch(pool: PagePool, step: Many[Scheduled], before: Callable[[int], None] | None = None) -> Batch:
    """The tensors of a step; every sequence in it has the blocks for its tokens."""
    begins = np.array([one.sequence.computed for one in step], dtype=np.int64)
    counts = np.array([one.num_tokens + one.num_drafts for one in step], dtype=np.int64)
    ends = begins + counts
    starts = np.zeros(len(step) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    of_sequence = np.repeat(np.arange(len(step)), counts)
    positions = np.arange(starts[-1]) - (starts[:-1] - begins)[of_sequence]
    query_starts = torch.from_numpy(starts.astype(np.int32))
    lengths = torch.from_numpy(ends.astype(np.int32))

    layers: dict[int, LayerStep] = {}
    states = None
    for group in pool.groups:
        if group.attention is None:
            slots = np.array([_table(one).groups[group.name][0] for one in step], dtype=np.int64)
            states = StateStep(torch.from_numpy(slots), torch.from_numpy(begins == 0), query_starts)
            continue
        found = _group_step(pool, group, step, begins, ends, positions, of_sequence, lengths, query_starts)
        for layer in group.spec.layers:
            layers[layer] = LayerStep(pool.pages[layer], group.attention, found.sequences, found.blocks, found.offsets)

    token_ids: list[int] = []
    logits_rows: list[int] = []
    rows: list[Row] = []
    on_layer: list[Callable[[int], None]] = []
    for one, begin, end in zip(step, begins.tolist(), ends.tolist(), strict=True):
        sequence = one.sequence
        token_ids += sequence.tokens[begin : end - one.num_drafts]
        if end - one.num_drafts == len(sequence.tokens):
            logits_rows += range(len(token_ids) - 1, len(token_ids) + one.num_drafts)
            drafts = tuple(sequence.drafts[: one.num_drafts])
            rows += [Row(sequence, drafts[:count]) for count in range(one.num_drafts + 1)]
            token_ids += drafts
        if sequence.request.on_layer is not None:
            on_layer.append(_teller(sequence.request.on_layer, _table(one), end))
    return Batch(
        token_ids=torch.tensor([token_ids]),
        positions=torch.from_numpy(positions)[None],
        layers=layers,
        states=states,
        logits_rows=torch.tensor(logits_rows, dtype=torch.long),
        rows=rows,
        on_layer=on_layer,
        before=before,
    )


def _group_step(
    pool: PagePool,
    group: CacheGroup,
    step: Many[Scheduled],
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
        first = np.zeros(len(step), dtype=np.int64)
    end = -(-ends // size)
    tables = np.zeros((len(step), int((end - first).max())), dtype=np.int32)
    for row, (one, low, high) in enumerate(zip(step, first.tolist(), end.tolist(), strict=True)):
        tables[row, : high - low] = _table(one).array(group.name, high)[low:high]
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


def _table(one: Scheduled) -> BlockTable:
    assert one.sequence.table is not None
    return one.sequence.table


def _teller(on_layer: OnLayer, table: BlockTable, num_tokens: int) -> Callable[[int], None]:
    return lambda layer: on_layer(table, layer, num_tokens)
