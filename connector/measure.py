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
    first = geometry.groups[0].name
    sizes = link.geometry.block_size, geometry.block_size
    num_tokens = min(link.geometry.group(first).num_blocks * sizes[0], len(block_ids) * sizes[1])
    theirs, ours = ({group.name: list[int]() for group in geometry.groups} for _ in range(2))
    theirs[first] = list(range(-(-num_tokens // sizes[0])))
    ours[first] = block_ids[: -(-num_tokens // sizes[1])]
    plan = plan_read(
        source=link.geometry,
        source_blocks=theirs,
        destination=geometry,
        destination_blocks=ours,
        num_tokens=num_tokens,
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
