"""Who holds which block of the pool, which tokens lie in it, and which may be used again."""

from engine.blocks.chain import HashChain, root_hash
from engine.blocks.group import BlockGroup
from engine.blocks.kinds import Kind, StateSlots, kind_of
from engine.blocks.pool import Admission, BlockPool
from engine.blocks.table import NO_BLOCK, BlockTable

__all__ = [
    "NO_BLOCK",
    "Admission",
    "BlockGroup",
    "BlockPool",
    "BlockTable",
    "HashChain",
    "Kind",
    "StateSlots",
    "kind_of",
    "root_hash",
]
