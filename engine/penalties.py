"""Repetition, frequency and presence penalties, on the logits of a whole batch at once.

As OpenAI defines the latter two: `frequency_penalty` is subtracted once per occurrence in the output,
`presence_penalty` once for every token that occurs there. The repetition penalty (Keskar et al., 2019) divides positive
and multiplies negative logits of every token in prompt or output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many

import numpy as np
import torch

from engine.request import SamplingParams
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


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether any of the three changes anything."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def apply_penalties(logits: torch.Tensor, sequences: Many[Sequence]) -> torch.Tensor:
    """`logits` [rows, vocabulary] with each sequence's penalties; a copy if there are any."""
    penalised = [(row, one) for row, one in enumerate(sequences) if has_penalties(one.request.sampling)]
    if not penalised:
        return logits
    logits = logits.clone()
    _repetition(logits, [(row, one) for row, one in penalised if one.request.sampling.repetition_penalty != 1.0])
    _occurrence(logits, penalised)
    return logits


def _counts(sequence: Sequence) -> TokenCounts:
    if sequence.counts is None:
        sequence.counts = TokenCounts(sequence.tokens[: sequence.num_prompt], sequence.tokens[sequence.num_prompt :])
    return sequence.counts


def _repetition(logits: torch.Tensor, rows: Many[tuple[int, Sequence]]) -> None:
    if not rows:
        return
    seen = [np.fromiter(_counts(one).seen, dtype=np.int64) for _, one in rows]
    sizes = [len(ids) for ids in seen]
    index = torch.from_numpy(np.repeat([row for row, _ in rows], sizes))
    tokens = torch.from_numpy(np.concatenate(seen))
    factor = torch.from_numpy(np.repeat([one.request.sampling.repetition_penalty for _, one in rows], sizes)).float()
    values = logits[index, tokens]
    logits[index, tokens] = torch.where(values > 0, values / factor, values * factor)


def _occurrence(logits: torch.Tensor, rows: Many[tuple[int, Sequence]]) -> None:
    index, tokens, amounts = [], [], []
    for row, one in rows:
        sampling, output = one.request.sampling, _counts(one).output
        if not output or (sampling.frequency_penalty == 0.0 and sampling.presence_penalty == 0.0):
            continue
        counts = np.fromiter(output.values(), dtype=np.float64)
        index.append(np.full(len(output), row, dtype=np.int64))
        tokens.append(np.fromiter(output.keys(), dtype=np.int64))
        amounts.append(sampling.frequency_penalty * counts + sampling.presence_penalty)
    if index:
        where = torch.from_numpy(np.concatenate(index)), torch.from_numpy(np.concatenate(tokens))
        logits[where] -= torch.from_numpy(np.concatenate(amounts)).float()
