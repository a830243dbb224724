"""A request while it is in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from engine.request import EngineRequest

if TYPE_CHECKING:
    from engine.blocks import BlockTable
    from engine.penalties import TokenCounts


class Sequence(msgspec.Struct, eq=False):
    """`tokens` is prompt plus output; the KV of the first `computed` of them lies in the blocks of `table`.

    A token can be drawn when all of them are computed. A sequence without a table has no KV anywhere. `arrival` is its
    place among those who wait for blocks.
    """

    request: EngineRequest
    tokens: list[int]
    num_prompt: int
    table: BlockTable | None
    computed: int
    arrival: int = 0
    prompt_tokens_computed: int = 0
    counts: TokenCounts | None = None
    aborted: bool = False

    @property
    def remaining(self) -> int:
        """Tokens to compute until the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.num_prompt


def new_sequence(request: EngineRequest) -> Sequence:
    """The sequence of a request that has just been submitted."""
    return Sequence(
        request=request,
        tokens=[*request.prompt_token_ids, *request.output_token_ids],
        num_prompt=len(request.prompt_token_ids),
        table=request.table,
        computed=request.computed_tokens,
    )
