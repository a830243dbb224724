"""Drafts from a smaller model, whose cache is a group of the same pool.

Its pages are allocated, shared, dropped and handed over with the target's: a block is published only when both have
written it. In each step it computes what the target has computed, and then, for sequences that are being answered,
draws its own likeliest tokens one by one. What it wrote for drafts that turn out wrong is written over.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

from engine.batch import Span, build_spans
from engine.blocks import BlockPool
from engine.groups import CacheGroup
from engine.pool import PagePool
from engine.runner import forward
from engine.sequence import Sequence
from engine.speculation.proposer import wanted_drafts


class DraftModel:
    """See the module. `groups` are those of its layers, which are numbered from `first_layer` on in the pool. `zero` is
    called when blocks have been taken that are about to be written: nothing may wipe them in the next step."""

    def __init__(
        self,
        model: Any,
        pool: PagePool,
        groups: Many[CacheGroup],
        blocks: BlockPool,
        zero: Callable[[], None],
        *,
        first_layer: int,
        num_drafts: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._pool = pool
        self._groups = groups
        self._blocks = blocks
        self._zero = zero
        self._first_layer = first_layer
        self._num_drafts = num_drafts
        self._max_model_len = max_model_len

    def propose(self, sequences: Many[Sequence]) -> None:
        """See `Proposer`."""
        counts = {id(one): self._room(one) for one in sequences}
        self._zero()
        spans, owners = [], []
        for one in sequences:
            assert one.table is not None
            # One that is answered goes on from its last token, which the target has not computed yet.
            end = len(one.tokens) if counts[id(one)] else one.computed
            if end > one.drafted:
                spans.append(Span(one.table, one.drafted, one.tokens[one.drafted : end], 1 if counts[id(one)] else 0))
                owners.append(one)
            one.drafts = []
        while spans:
            drawn = self._likeliest(spans)
            for one, span in zip(owners, spans, strict=True):
                one.drafted = span.begin + len(span.token_ids)
            drafting = [one for one in owners if len(one.drafts) < counts[id(one)]]
            spans, owners = [], []
            for one, token in zip(drafting, drawn, strict=True):
                one.drafts.append(token)
                if len(one.drafts) < counts[id(one)]:
                    assert one.table is not None
                    spans.append(Span(one.table, one.drafted, [token], 1))
                    owners.append(one)

    def _room(self, sequence: Sequence) -> int:
        """How many drafts there are blocks for."""
        count = wanted_drafts(sequence, self._num_drafts, self._max_model_len)
        if not count:
            return 0
        assert sequence.table is not None
        enough = self._blocks.extend(sequence.table, len(sequence.tokens) + count, sequence.computed)
        return count if enough else 0

    def _likeliest(self, spans: Many[Span]) -> list[int]:
        """The likeliest token after each span that wants one."""
        logits = forward(self._model, build_spans(self._pool, self._groups, spans, self._first_layer))
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        return tokens
