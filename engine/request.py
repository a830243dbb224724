"""What the engine is asked, and what it answers.

Workers hand an `EngineRequest` to `engine.Engine.submit` and hear of it through its `sink`. How a request came to be is
of no interest here: a request whose prompt was computed elsewhere simply starts with `computed_tokens` and the blocks
that hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from engine.blocks import BlockTable
    from engine.loads import Load


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens. Draws are keyed by (`seed`, position of the drawn token), so it does not matter where or in
    which batch they are made.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0 and `min_p` 0 keep everything. `repetition_penalty` 1 changes
    nothing and counts prompt and output; the other two count the output only.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


FinishReason = Literal["stop", "length"]


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn token. `position` is its place in prompt + output; `finish` is set on the request's last token.

    `logprob` is the natural logarithm of its probability before temperature and filters. `prompt_tokens_computed` are
    the prompt tokens that this engine has computed for the request so far; computing one again counts again.
    `cached_tokens` of the prompt came from the prefix cache.
    """

    token_id: int
    logprob: float
    position: int
    finish: FinishReason | None
    prompt_tokens_computed: int
    cached_tokens: int = 0


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The request ended without finishing; its blocks are free again."""

    message: str


Output: TypeAlias = Token | Failed
OnLayer: TypeAlias = Callable[["BlockTable", int, int], None]
NewLoad: TypeAlias = Callable[["BlockTable"], "Load"]


class EngineRequest(msgspec.Struct, kw_only=True):
    """One sequence to continue.

    `sink` is called on the engine's thread, once per output, and must not block; nothing comes after a `Token` with
    `finish`, a `Failed`, or once `Engine.abort` has returned.
    `table` (optional) holds the KV of the first `computed_tokens` tokens of prompt + output; the engine takes over its
    ownership at `submit`. `output_token_ids` are tokens already drawn elsewhere.
    `on_layer` is called on the engine's thread, within the forward pass, when a layer's KV of this step's tokens lies
    in the blocks: with the table, the layer, and how many tokens it now holds. It must not block. Such a request is
    never preempted: its pages may be on their way.
    `load` (optional, instead of a table) brings the KV of the first `computed_tokens` tokens in the step that begins
    with the request: it is called with the blocks to load into, on the engine's thread. When the load fails, what it
    should have brought is computed here, or the request fails, as `on_load_failure` says.
    `adapter` and `cache_salt` keep the prefix cache's entries of a request apart from those of others.
    `retain`: when the request finishes, its blocks are not freed; the caller owns `table` again (and frees it).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    sink: Callable[[Output], None]
    output_token_ids: list[int] = msgspec.field(default_factory=list)
    table: BlockTable | None = None
    computed_tokens: int = 0
    load: NewLoad | None = None
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    adapter: str = ""
    cache_salt: str = ""
    retain: bool = False
    on_layer: OnLayer | None = None
