"""Drafts from the sequence itself: what followed the last tokens where they stood before.

Costs next to nothing, and helps where answers repeat their prompt: summaries, edits, code.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from engine.sequence import Sequence
from engine.speculation.proposer import wanted_drafts

NGRAM = 3
"""The longest run of tokens that is looked for; shorter ones when it is not found."""


class PromptLookup:
    """See the module."""

    def __init__(self, num_drafts: int, max_model_len: int) -> None:
        self._num_drafts = num_drafts
        self._max_model_len = max_model_len

    def propose(self, sequences: Many[Sequence]) -> None:
        """See `Proposer`."""
        for sequence in sequences:
            count = wanted_drafts(sequence, self._num_drafts, self._max_model_len)
            sequence.drafts = self._look_up(sequence.tokens, count) if count else []

    def _look_up(self, tokens: list[int], count: int) -> list[int]:
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=count, max_matching_ngram_size=NGRAM, max_length=self._max_model_len
        )
        candidates, _ = generator.get_candidates(torch.tensor([tokens]))
        drafts: list[int] = candidates[0, len(tokens) :].tolist()
        return drafts
