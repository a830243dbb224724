"""Everything a measurement says no with.

BenchError                one sentence: what happened, with which value, what to do
├── BadRequest            the request has to change first; nothing was measured
├── ContenderFailed       a contender's process broke, was late, or ended; carries the end of its log
└── WrongBytes            a contender moved other bytes than it was told to: its times mean nothing
"""

from __future__ import annotations


class BenchError(Exception):
    """Base of everything this package raises on purpose."""


class BadRequest(BenchError):
    """An option has a value that cannot be."""


class ContenderFailed(BenchError):
    """A contender's process broke, was late, or ended by itself."""

    def __init__(self, who: str, reason: str, log_tail: str) -> None:
        super().__init__(f"{who} {reason}" + (f"\nThe end of its log:\n{log_tail}" if log_tail else ""))


class WrongBytes(BenchError):
    """The destination does not hold the source's bytes after a completed operation."""
