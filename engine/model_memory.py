"""The page pool that a loaded model needs, and the bookkeeping of its blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import torch

from engine.blocks import BlockGroup, BlockPool
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.groups import CacheGroup, divide
from engine.model_info import ModelInfo
from engine.pool import PagePool
from engine.zeroing.needs import needs_kv_cache_zeroing

logger = logging.getLogger(__name__)


class ModelMemory(msgspec.Struct, frozen=True):
    """`max_model_len` is what the model allows and the pool can hold, in tokens."""

    groups: list[CacheGroup]
    pool: PagePool
    blocks: BlockPool
    max_model_len: int


def allocate_memory(
    info: ModelInfo, config: EngineConfig, groups: Sequence[CacheGroup], dtypes: Mapping[str, torch.dtype]
) -> ModelMemory:
    """Divide `config.kv_cache_bytes` among the groups; `dtypes` are those of the pages of attention, by group.

    Raises:
        EngineError: the pool is too small, or cannot be had.
    """
    wanted = min(config.max_model_len or info.max_position_embeddings, info.max_position_embeddings)
    num_blocks = divide(
        groups,
        config.kv_cache_bytes,
        block_size=config.block_size,
        max_model_len=wanted,
        step_tokens=config.max_num_batched_tokens,
        scratch=0 if config.speculation == "none" else 1,
    )
    zeroing = needs_kv_cache_zeroing([group.spec for group in groups])
    blocks = BlockPool(
        [BlockGroup(group.name, group.kind, num_blocks[group.name], zeroing=zeroing) for group in groups],
        config.block_size,
        prefix_cache=config.prefix_cache,
    )
    return ModelMemory(
        groups=list(groups),
        pool=PagePool(groups, layout=config.layout, block_size=config.block_size, num_blocks=num_blocks, dtypes=dtypes),
        blocks=blocks,
        max_model_len=_max_model_len(groups, num_blocks, config, wanted),
    )


def _max_model_len(
    groups: Sequence[CacheGroup], num_blocks: Mapping[str, int], config: EngineConfig, wanted: int
) -> int:
    keeping = [num_blocks[group.name] for group in groups if group.attention is not None and not group.kind.drops]
    held = min([wanted, *(count * config.block_size for count in keeping)])
    if held < wanted:
        logger.warning(
            "a request may have at most %d tokens, not %d: the page pool holds no more; raise engine.kv_cache_bytes",
            held,
            wanted,
        )
    if config.max_model_len and held < 1:
        raise EngineError(f"engine.kv_cache_bytes is {config.kv_cache_bytes}, which holds no token")
    return held
