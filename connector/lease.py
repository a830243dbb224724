"""How long a source is kept, seen from either end.

The producer counts from when it *received* the request or renewal, the consumer from *before it sent* it. With one
`lease_s`, the consumer's deadline is therefore never later than the producer's, whatever the network does, and no clock
is shared: a READ that finished before the consumer's deadline read blocks that the producer still held.
"""

from __future__ import annotations

from math import inf


class Lease:
    """A deadline that only ever moves later, until it ends. Times are seconds of the owner's own monotonic clock."""

    __slots__ = ("deadline", "lease_s")

    def __init__(self, since: float, lease_s: float) -> None:
        self.lease_s = lease_s
        self.deadline = since + lease_s

    def renew(self, since: float) -> None:
        """Count again from `since`; an older renewal that arrives late shortens nothing."""
        self.deadline = max(self.deadline, since + self.lease_s)

    def end(self) -> None:
        """The other end has said that it is over; no renewal brings it back."""
        self.deadline = -inf
        self.lease_s = -inf

    def expired(self, now: float) -> bool:
        """Whether the deadline has come."""
        return now >= self.deadline
