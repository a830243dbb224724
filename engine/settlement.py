"""What the result of a step means for its sequences.

Everything here happens after the step's last write: what a sequence's blocks hold is published only now, tokens count
as computed only now, and states are put aside for others as they are after exactly the tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

import msgspec

from engine.blocks import BlockPool
from engine.page_work import BlockCopy
from engine.request import Failed, FinishReason, Output, Token
from engine.rows import Row
from engine.sampler import Drawn
from engine.scheduler import Scheduled, state_copies
from engine.sequence import Sequence
from engine.speculation.acceptance import accept


class Advance(msgspec.Struct, frozen=True):
    """How far a sequence has come: tokens run through the model, those of them that belong to its prompt, and what its
    owner is to be told."""

    sequence: Sequence
    num_tokens: int
    num_prompt_tokens: int
    outputs: list[Output]

    @property
    def failed(self) -> bool:
        """Whether the sequence ends because nothing could be drawn."""
        return any(isinstance(output, Failed) for output in self.outputs)


class Settlement:
    """See the module. `copy` carries block copies out at once. `aligned` when states are kept for others. With
    `drafting` a second model writes its own KV after this."""

    def __init__(
        self, blocks: BlockPool, copy: Callable[[list[BlockCopy]], None], *, aligned: bool, drafting: bool
    ) -> None:
        self._blocks = blocks
        self._copy = copy
        self._aligned = aligned
        self._drafting = drafting
        self.drafts_verified = 0
        self.drafts_accepted = 0

    def advance(
        self, scheduled: Many[Scheduled], rows: Many[Row], drawn: Many[Drawn | None], failed: Many[Sequence] = ()
    ) -> list[Advance]:
        """Settle a step, except for the sequences in `failed`, whose results are of no use. Publishes nothing."""
        advances = []
        place = 0
        for one in scheduled:
            sequence = one.sequence
            first = place
            while place < len(rows) and rows[place].sequence is sequence:
                place += 1
            if sequence not in failed:
                advances.append(self._settle(one, drawn[first:place]))
        return advances

    def _settle(self, one: Scheduled, drawn: Many[Drawn | None]) -> Advance:
        sequence = one.sequence
        drafts = sequence.drafts[: one.num_drafts]
        self._blocks.copied(sequence.copies)
        sequence.copies, sequence.load, sequence.to_load, sequence.drafts = [], None, False, []
        of_prompt = max(0, min(sequence.num_prompt - sequence.computed, one.num_tokens))
        sequence.prompt_tokens_computed += of_prompt
        outputs = [_append(sequence, one) for one in _until_finished(sequence, accept(drafts, drawn))]
        self.drafts_verified += len(drafts)
        self.drafts_accepted += max(0, len(outputs) - 1)
        if not any(isinstance(output, Failed) for output in outputs):
            self._move_on(sequence, one.num_tokens, len(drafts), max(0, len(outputs) - 1))
        return Advance(sequence, one.num_tokens + len(drafts), of_prompt, outputs)

    def _move_on(self, sequence: Sequence, num_tokens: int, num_drafts: int, accepted: int) -> None:
        assert sequence.table is not None
        if accepted < num_drafts and sequence.table.scratch:
            # The state has seen drafts that were wrong: back to before the step, which is done again without them.
            self._copy(state_copies(sequence, to_scratch=False))
        else:
            sequence.computed += num_tokens + accepted
        sequence.drafted = min(sequence.drafted, sequence.computed) if self._drafting else sequence.computed

    def publish(self, sequence: Sequence) -> None:
        """Let others use what has been written of a sequence."""
        table, size = sequence.table, self._blocks.block_size
        assert table is not None
        self._blocks.publish(table, sequence.tokens, sequence.written, sequence.chain)
        if self._aligned and sequence.computed and sequence.computed % size == 0:
            full = sequence.computed // size
            digest = sequence.chain.of(sequence.tokens, full)[full - 1]
            copies = self._blocks.keep_states(table, digest)
            self._copy(copies)
            self._blocks.kept(copies, digest)


def _until_finished(sequence: Sequence, drawn: Many[Drawn | None]) -> Iterator[Drawn | None]:
    for one in drawn:
        yield one
        if one is None or _finish(sequence) is not None:
            return


def _append(sequence: Sequence, drawn: Drawn | None) -> Output:
    if drawn is None:
        return Failed(message="the model's logits for it are not finite")
    position = len(sequence.tokens)
    sequence.tokens.append(drawn.token_id)
    if sequence.counts is not None:
        sequence.counts.add(drawn.token_id)
    return Token(
        token_id=drawn.token_id,
        logprob=drawn.logprob,
        position=position,
        finish=_finish(sequence),
        prompt_tokens_computed=sequence.prompt_tokens_computed,
        cached_tokens=sequence.cached_tokens,
    )


def _finish(sequence: Sequence) -> FinishReason | None:
    """Why the sequence ends with its last token."""
    if sequence.num_output == 0:
        return None
    if sequence.tokens[-1] in sequence.request.stop_token_ids:
        return "stop"
    return "length" if sequence.num_output >= sequence.request.max_tokens else None
