"""Whether Ray has what the workers ask for, found out before any of them is started.

First by counting, which can name exactly what is missing. Then by reserving all of it at once in a placement group: on
a cluster that others use as well, only Ray can tell, and it would otherwise wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.demand import Demand, describe, refuse_shortage
from deploy.errors import ResourcesError


async def reserve(demands: Sequence[Demand], timeout_s: float) -> Reservation:
    """Reserve everything, on as few nodes as possible.

    Raises:
        ResourcesError: Ray lacks something, or others use it.
    """
    nodes = [node["Resources"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
    refuse_shortage(demands, nodes)
    placed = [demand for demand in demands if demand.resources]
    if not placed:
        return Reservation(None, {})
    group = placement_group([demand.resources for demand in placed], strategy="PACK")
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        free = await asyncio.to_thread(ray.available_resources)
        remove_placement_group(group)
        asked = "; ".join(f"{demand.name}: {describe(demand.resources)}" for demand in placed)
        names = {resource for demand in placed for resource in demand.resources}
        available = describe({name: float(free.get(name, 0.0)) for name in sorted(names)})
        raise ResourcesError(
            f"Ray could not place the workers within {timeout_s:g} s ({asked}); "
            f"free in the whole cluster: {available}; wait for others to finish, or ask for less"
        ) from None
    return Reservation(group, {demand.name: index for index, demand in enumerate(placed)})


class Reservation:
    """Reserved resources, one bundle per worker that asks for any."""

    def __init__(self, group: PlacementGroup | None, bundles: dict[str, int]) -> None:
        self._group = group
        self._bundles = bundles

    def strategy(self, name: str) -> PlacementGroupSchedulingStrategy | str:
        """Ray's scheduling strategy for the worker `name`."""
        if name not in self._bundles:
            return "DEFAULT"
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[name])

    def release(self) -> None:
        """Give everything back; what still runs in it is ended by Ray."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
