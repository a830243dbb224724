"""Stop strings in text that arrives in pieces.

The text ends where a stop string is completed first; when several are completed by the same character, the longest
counts. That is decided character by character, so the result does not depend on how the text was cut. Text that could
still become a stop string is held back, and nothing else is.

Each stop string has a Knuth-Morris-Pratt automaton: its state is how many of its characters the text ends with. Work
per character does not grow with the lengths of the strings.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed it text with `push`; `stopped` tells that a stop string has been met. `flush` releases what is held."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._automata = [_Automaton(string) for string in strings]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to belong to the answer. After a stop it is always empty."""
        if self.stopped:
            return ""
        if not self._automata:
            return text
        buffer = self._held + text
        for end in range(len(self._held), len(buffer)):
            completed = 0
            for automaton in self._automata:
                if automaton.step(buffer[end]):
                    completed = max(completed, len(automaton.string))
            if completed:
                self.stopped = True
                self._held = ""
                return buffer[: end + 1 - completed]
        keep = max(automaton.matched for automaton in self._automata)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text has ended: what was held back, once."""
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.matched = 0
        return held


class _Automaton:
    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        # _fallback[n]: the longest proper prefix of the first n characters that is also their suffix.
        self._fallback = [0, 0]
        for length in range(1, len(string)):
            shorter = self._fallback[length]
            while shorter and string[shorter] != string[length]:
                shorter = self._fallback[shorter]
            self._fallback.append(shorter + (string[shorter] == string[length]))

    def step(self, character: str) -> bool:
        """True when this character completes the string."""
        matched = self.matched
        while matched and self.string[matched] != character:
            matched = self._fallback[matched]
        matched += self.string[matched] == character
        if matched == len(self.string):
            self.matched = self._fallback[matched]
            return True
        self.matched = matched
        return False
