"""The engine's settings; the defaults live here and nowhere else."""

from __future__ import annotations

from typing import Literal

import msgspec

from connector.pages import LAYOUTS


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is run over a page pool.

    `kv_cache_bytes` is the size of the page pool. `max_num_batched_tokens` is the budget of one step, in tokens: longer
    prompts are computed in chunks. `max_num_seqs` bounds the sequences in one step. `max_model_len` (tokens, prompt
    plus output; 0: what the model allows) is cut to what the pool can hold. `compute_threads` is per worker; workers
    that share a machine fight over cores when it is larger than their share.

    `prefix_cache` keeps what has been computed for whoever asks with the same beginning. `state_cache` says what is
    kept of recurrent models: nothing (`none`), or the states at borders of blocks (`align`).

    `speculation` lets one step verify up to `num_drafts` guesses at a sequence's next tokens; they come from what the
    sequence has said before (`prompt_lookup`), or from the model in the folder `draft_model`. Answers stay the same.
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    block_size: int = 16
    layout: str = "BLHNC"
    kv_cache_bytes: int = 1 << 30
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 0
    compute_threads: int = 1
    prefix_cache: bool = True
    state_cache: Literal["none", "align"] = "align"
    speculation: Literal["none", "prompt_lookup", "draft_model"] = "none"
    num_drafts: int = 4
    draft_model: str = ""

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "kv_cache_bytes",
            "max_num_batched_tokens",
            "max_num_seqs",
            "compute_threads",
            "num_drafts",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len < 0:
            raise ValueError(f"engine.max_model_len is {self.max_model_len}; it must be 0 (the model's own) or more")
        if bool(self.draft_model) != (self.speculation == "draft_model"):
            raise ValueError(
                f"engine.speculation is {self.speculation!r}, engine.draft_model {self.draft_model!r}; the folder of a "
                "draft model is needed for 'draft_model', and for nothing else"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"engine.layout is {self.layout!r}; it must be one of {', '.join(LAYOUTS)}")
