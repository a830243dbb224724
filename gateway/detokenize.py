"""Token ids into text, one id at a time: the pieces joined are what decoding all ids at once gives.

The tokenizer's own decoder is asked about a short *window* of the last ids, and what its text grew by is the piece. How
a decoder joins tokens (leading spaces, word pieces) therefore stays its business. What is known here:

- Ids that decoding skips (special tokens, ids that the tokenizer does not have) never enter the window: a window of
  nothing else would make the next token look like the first one, whose leading space is dropped.
- Text that ends in U+FFFD may be a character that later bytes complete. An incomplete character is one U+FFFD at the
  very end and at most three bytes, so that one is held back, and a window of four ids always contains it.
- Byte tokens (`<0xE2>`) are different: a run of them is decoded as a whole, valid or not, so a run is held until
  another token ends it.
"""

from __future__ import annotations

import re
from typing import Any

INCOMPLETE = "\ufffd"
TAIL_TOKENS = 4
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Vocabulary:
    """What detokenising needs to know of a `tokenizers.Tokenizer`; shared by all requests."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
        byte_tokens = set()
        if backend.decoder is not None and b"ByteFallback" in backend.decoder.__getstate__():
            byte_tokens = {number for token, number in backend.get_vocab().items() if BYTE_TOKEN.fullmatch(token)}
        self.special = frozenset(special)
        self.byte_tokens = frozenset(byte_tokens)

    def has_text(self, token_id: int) -> bool:
        """False for the ids that decoding skips."""
        return token_id not in self.special and self._backend.id_to_token(token_id) is not None

    def decode(self, token_ids: list[int]) -> str:
        """The text of all ids at once, special tokens skipped."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text


class Detokenizer:
    """One answer's text. `push` ids in order, then `flush` once at the end."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        # Characters of the window's text that have been given out.
        self._given = 0

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often its own, "" while a character is incomplete."""
        vocabulary = self._vocabulary
        if not vocabulary.has_text(token_id):
            return ""
        self._window.append(token_id)
        if token_id in vocabulary.byte_tokens:
            return ""
        text = vocabulary.decode(self._window)
        held = text.endswith(INCOMPLETE)
        certain = len(text) - held
        piece = text[self._given : certain]
        self._given = max(self._given, certain)
        keep = TAIL_TOKENS if held else 1
        if len(self._window) > keep:
            self._window = self._window[-keep:]
            self._given = len(vocabulary.decode(self._window)) - held
        return piece

    def flush(self) -> str:
        """What is still held back, as decoding has it; "" when called again."""
        piece = self._vocabulary.decode(self._window)[self._given :]
        self._given += len(piece)
        return piece
