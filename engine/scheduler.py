"""Which sequences take part in the next step, and with how many tokens.

Continuous batching with chunked prefill under one budget of tokens per step. Sequences that only need one token go
first, so that a long prompt never holds up answers that are being written; prompts share what is left, oldest first.
The oldest sequence always gets a token, however small the budget is. Drafts are verified with what nobody else needs.

A sequence that brings its blocks (its pages came from elsewhere) is admitted before those that wait for blocks. When
blocks run out, the youngest running sequence is preempted: it loses its blocks and is computed again later, from what
the prefix cache still has of it. The oldest running sequence can always take the others' blocks, and no request is
accepted that the whole pool could not hold, so that something always finishes. A sequence whose pages are sent as they
are computed is not preempted: it has the blocks of its whole prompt from the start, and ends with its first token.

Blocks are also reserved by others, for pages to come, and neither side may starve the other: they get blocks in the
order in which they asked (`engine.claims`).

Where a state is kept for others at borders of blocks, chunks of prompts end there.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine.blocks import BlockPool, BlockTable
from engine.claims import Claims
from engine.page_work import BlockCopy, PageWork
from engine.sequence import Sequence


class Scheduled(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of `sequence`, from its first uncomputed one, are computed in this step, and after them its
    first `num_drafts` drafts."""

    sequence: Sequence
    num_tokens: int
    num_drafts: int = 0


class Step(msgspec.Struct, frozen=True):
    """What is computed next, and what has to be done to the pages before."""

    scheduled: list[Scheduled]
    work: PageWork


class Scheduler:
    """See the module. Used by one thread at a time. `aligned` when states are kept at borders of blocks."""

    def __init__(
        self, blocks: BlockPool, *, max_num_batched_tokens: int, max_num_seqs: int, aligned: bool = False
    ) -> None:
        self._blocks = blocks
        self._budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._aligned = aligned
        self._running: list[Sequence] = []  # oldest first
        self._loaded: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()  # by arrival
        self._claims = Claims(blocks)
        self.preemptions = 0
        self.prompt_tokens_cached = 0

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
        return self._claims.reserve(owner, num_tokens, self._first_arrival())

    def take_turn_of_claims(self) -> bool:
        """Whether a reservation that had to stand behind a sequence may be asked for again. True once."""
        return self._claims.take_turn(self._first_arrival())

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence in."""
        sequence.arrival = self._claims.arrive()
        if sequence.table is None:
            self._waiting.append(sequence)
            return
        self._blocks.publish(sequence.table, sequence.tokens, sequence.computed, sequence.chain)
        self._loaded.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Its blocks stay with it."""
        self._drop_copies(sequence)
        for place in (self._running, self._loaded, self._waiting):
            if sequence in place:
                place.remove(sequence)
                return

    def sequences(self) -> list[Sequence]:
        """All of them."""
        return [*self._running, *self._loaded, *self._waiting]

    def schedule(self) -> Step:
        """The next step; every sequence in it has the blocks for its tokens. Nothing is scheduled when nothing can be
        computed until blocks or sequences come from outside."""
        self._claims.forget_old(self._first_arrival())
        while True:
            preemptions = self.preemptions
            self._admit()
            scheduled = self._divide_budget()
            # All may have lost their blocks, and the room they left lets others in.
            if scheduled or preemptions == self.preemptions:
                break
        return Step(scheduled, self._page_work(scheduled) if scheduled else PageWork())

    def _page_work(self, scheduled: list[Scheduled]) -> PageWork:
        work = PageWork(new_block_ids_to_zero=self._blocks.take_unzeroed())
        for one in scheduled:
            sequence = one.sequence
            work.copies += sequence.copies
            if one.num_drafts:  # a state cannot be cut back to the drafts that were right
                work.copies += state_copies(sequence, to_scratch=True)
            if sequence.load is not None:
                work.loads.append(sequence.load)
        return work

    def _divide_budget(self) -> list[Scheduled]:
        budget = self._budget
        step: list[Scheduled] = []
        oldest = self._running[0] if self._running else None
        kept = 1  # of the budget, for the oldest
        for sequence in sorted(self._running, key=lambda one: one.remaining > 1):  # stable: oldest first within each
            if sequence is oldest:
                kept = 0
            num_tokens = self._border(sequence, min(sequence.remaining, budget - kept))
            if num_tokens < 1:
                continue
            if sequence.table is None or not self._make_room(sequence, num_tokens, step):
                continue  # preempted in this very step
            budget -= num_tokens
            num_drafts = self._drafts(sequence, num_tokens, budget - kept)
            budget -= num_drafts
            step.append(Scheduled(sequence, num_tokens, num_drafts))
        return step

    def _border(self, sequence: Sequence, num_tokens: int) -> int:
        """Fewer tokens, where a state can be kept after them."""
        if not self._aligned or num_tokens <= 1:
            return num_tokens
        # The last token is computed for its logits in any case, so that the state before it is what others can use.
        end = min(sequence.computed + num_tokens, len(sequence.tokens) - 1)
        border = end - end % self._blocks.block_size
        return border - sequence.computed if border > sequence.computed else num_tokens

    def _drafts(self, sequence: Sequence, num_tokens: int, budget: int) -> int:
        """How many drafts are verified: nobody loses blocks for them."""
        if not sequence.drafts or num_tokens < sequence.remaining:
            return 0
        num_drafts = min(len(sequence.drafts), budget)
        assert sequence.table is not None
        end = sequence.computed + num_tokens
        if num_drafts < 1 or not self._blocks.extend(sequence.table, end + num_drafts, sequence.computed):
            return 0
        return num_drafts if self._blocks.take_scratch(sequence.table) else 0

    def _admit(self) -> None:
        while self._loaded and len(self._running) < self._max_num_seqs:
            self._running.append(self._loaded.popleft())
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            if self._running and self._claims.any_before(sequence.arrival):
                return
            if not self._give_blocks(sequence):
                return
            self._running.append(self._waiting.popleft())

    def _give_blocks(self, sequence: Sequence) -> bool:
        request = sequence.request
        if request.load is not None and sequence.to_load:
            table = self._blocks.allocate(
                request.request_id, len(sequence.tokens), computed=request.computed_tokens, record=True
            )
            if table is None:
                return False
            sequence.table = table
            sequence.computed = sequence.drafted = request.computed_tokens
            sequence.load = request.load(table)
            return True
        step_tokens = self._budget if request.on_layer is None else len(sequence.tokens)
        admission = self._blocks.admit(request.request_id, sequence.tokens, sequence.chain, step_tokens)
        if admission is None:
            return False
        sequence.table = admission.table
        sequence.computed = sequence.drafted = admission.cached_tokens
        sequence.cached_tokens = min(admission.cached_tokens, sequence.num_prompt)
        self.prompt_tokens_cached += sequence.cached_tokens
        sequence.copies = admission.copies
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int, step: list[Scheduled]) -> bool:
        """Give `sequence` the blocks for its next tokens, from younger sequences if need be."""
        assert sequence.table is not None
        if sequence.request.on_layer is None:
            self._blocks.trim(sequence.table, sequence.computed)
        while not self._blocks.extend(sequence.table, sequence.computed + num_tokens, sequence.computed):
            preemptible = [running for running in self._running if running.request.on_layer is None]
            youngest = preemptible[-1]
            self._preempt(youngest)
            step[:] = [scheduled for scheduled in step if scheduled.sequence is not youngest]
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.put_back(sequence)
        self.preemptions += 1

    def put_back(self, sequence: Sequence) -> None:
        """A running sequence loses its blocks, and is the next to get some."""
        self._running.remove(sequence)
        self.give_back(sequence)
        sequence.arrival = 0  # before all others
        self._waiting.appendleft(sequence)

    def give_back(self, sequence: Sequence, *, publish: bool = True) -> None:
        """Free the blocks of a sequence that no step in flight writes; what lies in them stays in the prefix cache."""
        table, sequence.table = sequence.table, None
        if table is not None:
            if sequence.settled and publish:
                self._blocks.publish_tail(table, sequence.tokens, sequence.written, sequence.chain)
            self._drop_copies(sequence)
            self._blocks.free(table)
        sequence.load = None
        sequence.drafts = []
        sequence.computed = sequence.drafted = 0

    def _drop_copies(self, sequence: Sequence) -> None:
        copies: list[BlockCopy] = sequence.copies
        sequence.copies = []
        self._blocks.copied(copies)

    def _first_arrival(self) -> int | None:
        return self._waiting[0].arrival if self._waiting else None


def state_copies(sequence: Sequence, *, to_scratch: bool) -> list[BlockCopy]:
    """Put the running states of a sequence aside while drafts are verified, or take them back."""
    table = sequence.table
    assert table is not None
    pairs = [(name, table.groups[name][0], slot) for name, slot in table.scratch.items()]
    return [
        BlockCopy(group=name, source=running if to_scratch else slot, destination=slot if to_scratch else running)
        for name, running, slot in pairs
    ]
