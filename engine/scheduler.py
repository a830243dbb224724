"""Which sequences take part in the next step, and with how many tokens.

Continuous batching with chunked prefill under one budget of tokens per step. Sequences that only need one token go
first, so that a long prompt never holds up answers that are being written; prompts share what is left, oldest first.
The oldest sequence always gets a token, however small the budget is.

A sequence that brings its blocks (its pages came from elsewhere) is admitted before those that wait for blocks. When
blocks run out, the youngest running sequence is preempted: it loses its blocks and is computed again later, from its
prompt and the tokens drawn so far. The oldest running sequence can always take the others' blocks, and no request is
accepted that the whole pool could not hold, so that something always finishes. A sequence whose pages are sent as they
are computed is not preempted: it has the blocks of its whole prompt from the start, and ends with its first token.

Blocks are also reserved by others, for pages to come, and neither side may starve the other: they get blocks in the
order in which they asked. A reservation that is refused leaves a `Claim`, which keeps its place. But who made it is not
bound to come back, so a claim holds nobody up when nothing runs, and is forgotten when blocks have come back and
nobody has asked again within `PATIENCE` steps.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine.blocks import BlockPool, BlockTable
from engine.sequence import Sequence


class Scheduled(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of `sequence`, from its first uncomputed one, are computed in this step."""

    sequence: Sequence
    num_tokens: int


PATIENCE = 20
"""In steps, which take milliseconds; who is told of free blocks and wants them asks at once."""


class Claim(msgspec.Struct, eq=False):
    """A reservation that was refused, and its place among those who wait for blocks."""

    arrival: int
    frees_seen: int
    steps_left: int = PATIENCE


class Scheduler:
    """See the module. Used by one thread at a time."""

    def __init__(self, blocks: BlockPool, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._running: list[Sequence] = []  # oldest first
        self._loaded: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()  # by arrival
        self._claims: dict[str, Claim] = {}
        self._arrivals = 0
        self._told_to_wait = False
        self.preemptions = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and are being computed."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not being computed yet, or not any more."""
        return len(self._waiting) + len(self._loaded)

    def reserve(self, owner: str, num_tokens: int) -> BlockTable | None:
        """Blocks for pages to come. None when there are not enough, or a sequence that waits for blocks came first;
        asking again under the same name keeps the place in the line."""
        claim = self._claims.get(owner)
        claim = Claim(self._arrive() if claim is None else claim.arrival, self._blocks.frees)
        if self._stands_before(claim):
            self._told_to_wait = True
            table = None
        else:
            table = self._blocks.allocate(owner, num_tokens)
        if table is None:
            self._claims[owner] = claim
        else:
            self._claims.pop(owner, None)
        return table

    def take_turn_of_claims(self) -> bool:
        """Whether a reservation that had to stand behind a sequence may be asked for again. True once."""
        if not self._told_to_wait or all(self._stands_before(claim) for claim in self._claims.values()):
            return False
        self._told_to_wait = False
        return True

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence in."""
        sequence.arrival = self._arrive()
        (self._waiting if sequence.table is None else self._loaded).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Its blocks stay with it."""
        for place in (self._running, self._loaded, self._waiting):
            if sequence in place:
                place.remove(sequence)
                return

    def sequences(self) -> list[Sequence]:
        """All of them."""
        return [*self._running, *self._loaded, *self._waiting]

    def schedule(self) -> list[Scheduled]:
        """The next step; every sequence in it has the blocks for its tokens. Empty when nothing can be computed until
        blocks or sequences come from outside."""
        self._forget_old_claims()
        while True:
            preemptions = self.preemptions
            self._admit()
            step = self._divide_budget()
            # All may have lost their blocks, and the room they left lets others in.
            if step or preemptions == self.preemptions:
                return step

    def _divide_budget(self) -> list[Scheduled]:
        budget = self._budget
        step: list[Scheduled] = []
        oldest = self._running[0] if self._running else None
        kept = 1  # of the budget, for the oldest
        for sequence in sorted(self._running, key=lambda one: one.remaining > 1):  # stable: oldest first within each
            if sequence is oldest:
                kept = 0
            num_tokens = min(sequence.remaining, budget - kept)
            if num_tokens < 1:
                continue
            if sequence.table is None or not self._make_room(sequence, num_tokens, step):
                continue  # preempted in this very step
            step.append(Scheduled(sequence, num_tokens))
            budget -= num_tokens
        return step

    def _admit(self) -> None:
        while self._loaded and len(self._running) < self._max_num_seqs:
            self._running.append(self._loaded.popleft())
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            if self._running and any(claim.arrival < sequence.arrival for claim in self._claims.values()):
                return
            table = self._blocks.allocate(sequence.request.request_id, len(sequence.tokens))
            if table is None:
                return
            sequence.table = table
            self._running.append(self._waiting.popleft())

    def _make_room(self, sequence: Sequence, num_tokens: int, step: list[Scheduled]) -> bool:
        """Give `sequence` the blocks for its next tokens, from younger sequences if need be."""
        assert sequence.table is not None
        while not self._blocks.extend(sequence.table, sequence.computed + num_tokens):
            preemptible = [running for running in self._running if running.request.on_layer is None]
            youngest = preemptible[-1]
            self._preempt(youngest)
            step[:] = [scheduled for scheduled in step if scheduled.sequence is not youngest]
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self._running.remove(sequence)
        self._blocks.free(sequence.table)
        sequence.table = None
        sequence.computed = 0
        sequence.arrival = 0  # before all others
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _arrive(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _stands_before(self, claim: Claim) -> bool:
        return bool(self._waiting) and self._waiting[0].arrival < claim.arrival

    def _forget_old_claims(self) -> None:
        for owner, claim in list(self._claims.items()):
            if claim.frees_seen == self._blocks.frees or self._stands_before(claim):
                continue  # there was no reason to ask again
            claim.steps_left -= 1
            if claim.steps_left == 0:
                del self._claims[owner]
