"""How fast is a link? Timed READs of whatever the peer's pages hold at the moment.

A measurement is an import without a source: nothing has a lease on the bytes, and nobody uses them. Its destination is
owned like any other import's until every operation is terminal.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable

from connector.errors import PeerLostError
from connector.identity import new_transfer_id
from connector.importer import Importer
from connector.link import Link
from connector.pages import PoolGeometry
from connector.plan import plan_read

ROUNDS = 5
SHORTEST_S = 1e-9


async def measure(
    link: Link, importer: Importer, geometry: PoolGeometry, block_ids: list[int], clock: Callable[[], float]
) -> float:
    """10^9 bytes a second: the median of a few READs into `block_ids` of this pool's first group.

    When this returns or raises, cancelled or not, nothing writes into the blocks any more.

    Raises:
        PlanError: the ids are not blocks of this pool.
        PeerLostError: the peer cannot be read from, or was lost.
    """
    group = geometry.groups[0].name
    theirs = link.geometry.group(group).num_blocks
    ours = block_ids[: min(len(block_ids), theirs)]
    plan = plan_read(
        source=link.geometry,
        source_blocks={group: list(range(len(ours)))},
        destination=geometry,
        destination_blocks={group: ours},
        num_tokens=len(ours) * geometry.block_size,
    )
    speeds = []
    for _ in range(ROUNDS):
        if link.data_peer is None:
            raise PeerLostError(f"{link.peer} cannot be read from at the moment")
        started = clock()
        transfer_id = new_transfer_id()
        settled = importer.post(transfer_id, link.data_peer, plan, None, lambda outcome: None)
        try:
            outcome = await asyncio.shield(settled)
        except asyncio.CancelledError:
            importer.cancel(transfer_id)
            await settled
            raise
        if outcome.outcome != "published":
            raise PeerLostError(f"measuring the link to {link.peer} failed: {outcome.reason}: {outcome.detail}")
        speeds.append(plan.total_bytes / max(clock() - started, SHORTEST_S) / 1e9)
    return statistics.median(speeds)
