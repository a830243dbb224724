"""Repetition, frequency and presence penalties, on the logits of a whole batch at once.

As OpenAI defines the latter two: `frequency_penalty` is subtracted once per occurrence in the output,
`presence_penalty` once for every token that occurs there. The repetition penalty (Keskar et al., 2019) divides positive
and multiplies negative logits of every token in prompt or output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many

import msgspec
import numpy as np
import torch

from engine.request import SamplingParams
from engine.rows import Row
from engine.sequence import Sequence


class TokenCounts:
    """Which tokens a sequence has, kept up to date as tokens are drawn."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self.output = Counter(output)
        self.seen = set(prompt) | self.output.keys()

    def add(self, token_id: int) -> None:
        """One more token of the output."""
        self.output[token_id] += 1
        self.seen.add(token_id)

    def with_drafts(self, drafts: Many[int]) -> TokenCounts:
        """As if these had been drawn, too."""
        if not drafts:
            return self
        counts = TokenCounts((), self.output)
        counts.seen |= self.seen
        for token_id in drafts:
            counts.add(token_id)
        return counts


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether any of the three changes anything."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


class _Penalised(msgspec.Struct, frozen=True):
    row: int
    sampling: SamplingParams
    counts: TokenCounts


def apply_penalties(logits: torch.Tensor, rows: Many[Row]) -> torch.Tensor:
    """`logits` [rows, vocabulary] with the penalties of each row's sequence; a copy if there are any. The drafts before
    a row count as output."""
    penalised = [
        _Penalised(number, row.sequence.request.sampling, _counts(row.sequence).with_drafts(row.drafts))
        for number, row in enumerate(rows)
        if has_penalties(row.sequence.request.sampling)
    ]
    if not penalised:
        return logits
    logits = logits.clone()
    _repetition(logits, [one for one in penalised if one.sampling.repetition_penalty != 1.0])
    _occurrence(logits, penalised)
    return logits


def _counts(sequence: Sequence) -> TokenCounts:
    if sequence.counts is None:
        sequence.counts = TokenCounts(sequence.tokens[: sequence.num_prompt], sequence.tokens[sequence.num_prompt :])
    return sequence.counts


def _repetition(logits: torch.Tensor, penalised: Many[_Penalised]) -> None:
    if not penalised:
        return
    seen = [np.fromiter(one.counts.seen, dtype=np.int64) for one in penalised]
    sizes = [len(ids) for ids in seen]
    index = torch.from_numpy(np.repeat([one.row for one in penalised], sizes))
    tokens = torch.from_numpy(np.concatenate(seen))
    factor = torch.from_numpy(np.repeat([one.sampling.repetition_penalty for one in penalised], sizes)).float()
    values = logits[index, tokens]
    logits[index, tokens] = torch.where(values > 0, values / factor, values * factor)


def _occurrence(logits: torch.Tensor, penalised: Many[_Penalised]) -> None:
    index, tokens, amounts = [], [], []
    for one in penalised:
        sampling, output = one.sampling, one.counts.output
        if not output or (sampling.frequency_penalty == 0.0 and sampling.presence_penalty == 0.0):
            continue
        counts = np.fromiter(output.values(), dtype=np.float64)
        index.append(np.full(len(output), one.row, dtype=np.int64))
        tokens.append(np.fromiter(output.keys(), dtype=np.int64))
        amounts.append(sampling.frequency_penalty * counts + sampling.presence_penalty)
    if index:
        where = torch.from_numpy(np.concatenate(index)), torch.from_numpy(np.concatenate(tokens))
        logits[where] -= torch.from_numpy(np.concatenate(amounts)).float()
