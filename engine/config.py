"""The engine's settings; the defaults live here and nowhere else."""

from __future__ import annotations

from typing import Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is run over a page pool.

    `kv_cache_bytes` is the size of the page pool. `max_num_batched_tokens` is the budget of one step, in tokens: longer
    prompts are computed in chunks. `max_num_seqs` bounds the sequences in one step. `max_model_len` (tokens, prompt plus
    output; 0: what the model allows) is cut to what the pool can hold. `compute_threads` is per worker; workers that
    share a machine fight over cores when it is larger than their share.
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    block_size: int = 16
    layout: str = "BLHNC"
    kv_cache_bytes: int = 1 << 30
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 0
    compute_threads: int = 1
