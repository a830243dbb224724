"""Reservations of blocks for pages to come, in line with the sequences that wait for blocks.

A reservation that is refused leaves a claim, which keeps its place. But who made it is not bound to come back, so a
claim holds nobody up when nothing runs, and is forgotten when blocks have come back and nobody has asked again within
`PATIENCE` steps.
"""

from __future__ import annotations

import msgspec

from engine.blocks import BlockPool, BlockTable

PATIENCE = 20
"""In steps, which take milliseconds; who is told of free blocks and wants them asks at once."""


class Claim(msgspec.Struct, eq=False):
    """A reservation that was refused, and its place among those who wait for blocks."""

    arrival: int
    frees_seen: int
    steps_left: int = PATIENCE


class Claims:
    """See the module. `first_waiting` is the arrival of the sequence that waits for blocks the longest, if any."""

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks
        self._claims: dict[str, Claim] = {}
        self._arrivals = 0
        self._told_to_wait = False

    def arrive(self) -> int:
        """The next place in the line."""
        self._arrivals += 1
        return self._arrivals

    def any_before(self, arrival: int) -> bool:
        """Whether a claim stands before this place."""
        return any(claim.arrival < arrival for claim in self._claims.values())

    def reserve(self, owner: str, num_tokens: int, first_waiting: int | None) -> BlockTable | None:
        """Blocks, or None and a place in the line; asking again under the same name keeps it."""
        claim = self._claims.get(owner)
        claim = Claim(self.arrive() if claim is None else claim.arrival, self._blocks.frees)
        if _behind(claim, first_waiting):
            self._told_to_wait = True
            table = None
        else:
            table = self._blocks.allocate(owner, num_tokens)
        if table is None:
            self._claims[owner] = claim
        else:
            self._claims.pop(owner, None)
        return table

    def take_turn(self, first_waiting: int | None) -> bool:
        """Whether a reservation that had to stand behind a sequence may be asked for again. True once."""
        if not self._told_to_wait or all(_behind(claim, first_waiting) for claim in self._claims.values()):
            return False
        self._told_to_wait = False
        return True

    def forget_old(self, first_waiting: int | None) -> None:
        """One step has passed."""
        for owner, claim in list(self._claims.items()):
            if claim.frees_seen == self._blocks.frees or _behind(claim, first_waiting):
                continue  # there was no reason to ask again
            claim.steps_left -= 1
            if claim.steps_left == 0:
                del self._claims[owner]


def _behind(claim: Claim, first_waiting: int | None) -> bool:
    return first_waiting is not None and first_waiting < claim.arrival
