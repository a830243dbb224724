"""Which sequences take part in the next step, and with how many tokens.

Continuous batching with chunked prefill under one budget of tokens per step. Sequences that only need one token go
first, so that a long prompt never holds up answers that are being written; prompts share what is left, oldest first.

A sequence that brings its blocks (its pages came from elsewhere) is admitted before those that wait for blocks. When
blocks run out, the youngest running sequence is preempted: it loses its blocks and is computed again later, from its
prompt and the tokens drawn so far. The oldest running sequence can always take the others' blocks, and no request is
accepted that the whole pool could not hold, so that something always finishes.

Blocks are also reserved by others, for pages to come. While a sequence waits for blocks they get none
(`may_reserve`), or a steady stream of them could starve it. Nor can it starve them: what it waits for is freed by
sequences that finish, and then it runs.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine.blocks import BlockPool
from engine.sequence import Sequence


class Scheduled(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of `sequence`, from its first uncomputed one, are computed in this step."""

    sequence: Sequence
    num_tokens: int


class Scheduler:
    """See the module. Used by one thread."""

    def __init__(self, blocks: BlockPool, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._running: list[Sequence] = []  # oldest first
        self._loaded: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()
        self.preemptions = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and are being computed."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not being computed yet, or not any more."""
        return len(self._waiting) + len(self._loaded)

    @property
    def may_reserve(self) -> bool:
        """Whether blocks may be taken for pages to come: not while a sequence waits for blocks."""
        return not self._waiting

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence in."""
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
        for sequence in sorted(self._running, key=lambda one: one.remaining > 1):  # stable: oldest first within each
            if budget == 0:
                break
            num_tokens = min(sequence.remaining, budget)
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
            table = self._blocks.allocate(sequence.request.request_id, len(sequence.tokens))
            if table is None:
                return
            sequence.table = table
            self._running.append(self._waiting.popleft())

    def _make_room(self, sequence: Sequence, num_tokens: int, step: list[Scheduled]) -> bool:
        """Give `sequence` the blocks for its next tokens, from younger sequences if need be."""
        assert sequence.table is not None
        while not self._blocks.extend(sequence.table, sequence.computed + num_tokens):
            youngest = self._running[-1]
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
        self._waiting.appendleft(sequence)
        self.preemptions += 1
