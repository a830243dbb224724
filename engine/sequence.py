"""A request while it is in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from engine.blocks import HashChain
from engine.request import EngineRequest

if TYPE_CHECKING:
    from engine.blocks import BlockTable
    from engine.loads import Load
    from engine.page_work import BlockCopy
    from engine.penalties import TokenCounts


class Sequence(msgspec.Struct, eq=False):
    """`tokens` is prompt plus output; the KV of the first `computed` of them lies in the blocks of `table`.

    A token can be drawn when all of them are computed. A sequence without a table has no KV anywhere. `chain` hashes
    its blocks. `drafts` are guesses at its next tokens, to be verified in the next step; of a draft model the KV of the
    first `drafted` tokens, and drafts after them, lies in its own blocks. `arrival` is its place among those who wait
    for blocks. `cached_tokens` of the prompt came from the prefix cache when it was last admitted.

    `copies` and `load` have still to be carried out: until then not all of its `computed` tokens lie in the blocks.
    `to_load` until a load has been tried.
    """

    request: EngineRequest
    tokens: list[int]
    num_prompt: int
    table: BlockTable | None
    computed: int
    chain: HashChain
    arrival: int = 0
    prompt_tokens_computed: int = 0
    cached_tokens: int = 0
    counts: TokenCounts | None = None
    drafted: int = 0
    drafts: list[int] = msgspec.field(default_factory=list)
    copies: list[BlockCopy] = msgspec.field(default_factory=list)
    load: Load | None = None
    to_load: bool = False
    aborted: bool = False

    @property
    def remaining(self) -> int:
        """Tokens to compute until the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def settled(self) -> bool:
        """Whether the KV of its computed tokens lies in its blocks now."""
        return not self.copies and self.load is None

    @property
    def written(self) -> int:
        """Tokens whose KV lies in all groups, a draft model's included."""
        return min(self.computed, self.drafted)

    @property
    def num_output(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.num_prompt


def new_sequence(request: EngineRequest, chain: HashChain) -> Sequence:
    """The sequence of a request that has just been submitted."""
    return Sequence(
        request=request,
        tokens=[*request.prompt_token_ids, *request.output_token_ids],
        num_prompt=len(request.prompt_token_ids),
        table=request.table,
        computed=request.computed_tokens if request.table is not None else 0,
        drafted=request.computed_tokens if request.table is not None else 0,
        chain=chain,
        to_load=request.load is not None,
    )
