"""An engine's parts, built from a model folder and settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from engine.config import EngineConfig
from engine.copies import BlockCopier
from engine.executor import Executor
from engine.groups import cache_groups
from engine.loading import load_model
from engine.model_info import ModelInfo
from engine.model_memory import ModelMemory, allocate_memory
from engine.prepack import prepack
from engine.zeroing.zeroer import Zeroer

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Parts(msgspec.Struct, frozen=True):
    """`aligned` when states of recurrent layers are kept for others at borders of blocks."""

    memory: ModelMemory
    executor: Executor
    aligned: bool


def assemble(info: ModelInfo, config: EngineConfig, progress: Callable[[str], None]) -> Parts:
    """Load the model and allocate its page pool, which takes seconds.

    Raises:
        ModelError: the model cannot be loaded.
        EngineError: the page pool cannot be had.
    """
    dtype = DTYPES[config.dtype]
    progress("loading the model")
    model: Any = load_model(info, dtype)
    aligned = config.prefix_cache and config.state_cache == "align" and any(layer.recurrent for layer in info.layers)
    groups = cache_groups(info.layers, itemsize=dtype.itemsize, aligned=aligned)
    progress("allocating the page pool")
    memory = allocate_memory(info, config, groups, {group.name: dtype for group in groups})
    try:
        if dtype is torch.bfloat16:
            progress("packing the weights")
            logger.info("%d linear layers packed for oneDNN", prepack(model))
        zeroer = Zeroer(memory.pool.geometry, memory.pool.whole)
        copier = BlockCopier(memory.pool.geometry, memory.pool.whole)
        return Parts(memory, Executor(model, memory.pool, zeroer, copier), aligned)
    except BaseException:
        memory.pool.close()
        raise
