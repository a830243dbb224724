"""Where a WRITE goes: what a consumer puts into its request to the producer."""

from __future__ import annotations

import msgspec

from connector.correspondence import check_blocks
from connector.errors import PlanError
from connector.identity import EngineId
from connector.pages import PoolGeometry
from connector.transport.base import Offsets


class DestinationRef(msgspec.Struct, frozen=True, kw_only=True):
    """The consumer's block ids by group, in the order of the tokens, for the tokens from `local_tokens` on: it has the
    first ones already. The producer writes the KV of the tokens before `num_tokens`."""

    transfer_id: str
    consumer: EngineId
    blocks: dict[str, list[int]]
    num_tokens: int
    local_tokens: int = 0


def check_destination(destination: DestinationRef, geometry: PoolGeometry, whose: str) -> dict[str, Offsets]:
    """The ids as arrays, proved to be blocks of the consumer's pool that can hold the tokens.

    Raises:
        PlanError: with the first that are not.
    """
    names = [group.name for group in geometry.groups]
    if set(destination.blocks) != set(names):
        raise PlanError(f"{whose} names blocks of groups {sorted(destination.blocks)}, its pool has {sorted(names)}")
    tokens, local = destination.num_tokens, destination.local_tokens
    return {
        name: check_blocks(geometry, name, ids, tokens, whose=whose, local_tokens=local)
        for name, ids in destination.blocks.items()
    }
