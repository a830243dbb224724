"""An engine's parts, built from a model folder and settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import EngineConfig
from engine.copies import BlockCopier
from engine.errors import ModelError
from engine.executor import Executor
from engine.fused import fuse
from engine.groups import CacheGroup, cache_groups
from engine.loading import load_model
from engine.model_info import ModelInfo, inspect_model
from engine.model_memory import ModelMemory, allocate_memory
from engine.prepack import prepack
from engine.speculation.draft_model import DraftModel
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.proposer import Proposer
from engine.zeroing.zeroer import Zeroer

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

DRAFT = "draft."
"""What the names of a draft model's groups begin with."""


class Parts(msgspec.Struct, frozen=True):
    """`aligned` when states of recurrent layers are kept for others at borders of blocks; `drafting` when a draft model
    has groups of its own."""

    memory: ModelMemory
    executor: Executor
    proposer: Proposer | None
    aligned: bool
    drafting: bool


class _Loaded(msgspec.Struct, frozen=True):
    model: Any
    groups: list[CacheGroup]


def assemble(info: ModelInfo, config: EngineConfig, progress: Callable[[str], None]) -> Parts:
    """Load the model and allocate its page pool, which takes seconds.

    Raises:
        ModelError: the model, or the draft model, cannot be loaded.
        EngineError: the page pool cannot be had.
    """
    dtype = DTYPES[config.dtype]
    aligned = config.prefix_cache and config.state_cache == "align" and any(layer.recurrent for layer in info.layers)
    progress("loading the model")
    target = _load(info, dtype, aligned=aligned)
    drafter = _load_drafter(info, config, dtype, progress)
    groups = target.groups + (drafter.groups if drafter else [])
    progress("allocating the page pool")
    memory = allocate_memory(info, config, groups, {group.name: dtype for group in groups})
    try:
        for loaded in (target, drafter):
            if loaded is not None and dtype is torch.bfloat16:
                progress("packing the weights")
                logger.info("%d modules fused, %d linear layers packed", fuse(loaded.model), prepack(loaded.model))
        zeroer = Zeroer(memory.pool.geometry, memory.pool.whole)
        copier = BlockCopier(memory.pool.geometry, memory.pool.whole)
        executor = Executor(target.model, memory.pool, target.groups, zeroer, copier)
        return Parts(memory, executor, _proposer(info, config, memory, drafter, zeroer), aligned, drafter is not None)
    except BaseException:
        memory.pool.close()
        raise


def _load(info: ModelInfo, dtype: torch.dtype, *, aligned: bool) -> _Loaded:
    return _Loaded(load_model(info, dtype), cache_groups(info.layers, itemsize=dtype.itemsize, aligned=aligned))


def _load_drafter(
    info: ModelInfo, config: EngineConfig, dtype: torch.dtype, progress: Callable[[str], None]
) -> _Loaded | None:
    if config.speculation != "draft_model":
        return None
    progress("loading the draft model")
    draft = inspect_model(Path(config.draft_model))
    if draft.vocab_size != info.vocab_size:
        raise ModelError(
            f"the draft model {draft.path} has {draft.vocab_size} tokens, the model {info.vocab_size}; they have to "
            "share a vocabulary"
        )
    if any(layer.recurrent for layer in draft.layers):
        raise ModelError(f"the draft model {draft.path} is recurrent, which a draft model may not be")
    groups = cache_groups(draft.layers, itemsize=dtype.itemsize, prefix=DRAFT, first_layer=info.num_layers)
    return _Loaded(load_model(draft, dtype), groups)


def _proposer(
    info: ModelInfo, config: EngineConfig, memory: ModelMemory, drafter: _Loaded | None, zeroer: Zeroer
) -> Proposer | None:
    if drafter is not None:
        return DraftModel(
            drafter.model,
            memory.pool,
            drafter.groups,
            memory.blocks,
            lambda: zeroer.zero(memory.blocks.take_unzeroed()),
            first_layer=info.num_layers,
            num_drafts=config.num_drafts,
            max_model_len=memory.max_model_len,
        )
    if config.speculation == "prompt_lookup":
        return PromptLookup(config.num_drafts, memory.max_model_len)
    return None
