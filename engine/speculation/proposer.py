"""Who guesses the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from engine.sequence import Sequence


class Proposer(Protocol):
    """Works on the engine's thread between two steps, after drawn tokens have been appended and before anybody is told
    of them, or given the blocks."""

    def propose(self, sequences: Many[Sequence]) -> None:
        """Set the `drafts` of those that can use some; the sequences are those of the step that has just ended."""


def wanted_drafts(sequence: Sequence, num_drafts: int, max_model_len: int) -> int:
    """How many drafts can be of use: none before all tokens but the last are computed, none for the last token, none
    for a sequence whose pages are sent while they are computed."""
    request = sequence.request
    if sequence.num_output == 0 or sequence.aborted or request.on_layer is not None:
        return 0
    if sequence.tokens[-1] in request.stop_token_ids:
        return 0
    left = request.max_tokens - sequence.num_output - 1
    return max(0, min(num_drafts, left, max_model_len - len(sequence.tokens) - 1))
