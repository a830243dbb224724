"""Whose next token is drawn from a row of logits."""

from __future__ import annotations

import msgspec

from engine.sequence import Sequence


class Row(msgspec.Struct, frozen=True):
    """The token that follows `sequence` and these drafts of it, as if they had been drawn."""

    sequence: Sequence
    drafts: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """The place of the token that is drawn, in prompt plus output."""
        return len(self.sequence.tokens) + len(self.drafts)
