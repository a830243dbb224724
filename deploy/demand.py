"""What the workers reserve, held against what there is. Pure: asked before Ray is started as well as of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from deploy.errors import ResourcesError
from deploy.settings import PoolSettings, Settings

Role: TypeAlias = Literal["prefill", "decode"]


class Demand(msgspec.Struct, frozen=True):
    """What one worker reserves, by Ray's resource names (`CPU`, `GPU`, custom ones)."""

    name: str
    role: Role
    resources: dict[str, float]

    def only(self, resource: str) -> Demand:
        """Its part of one resource."""
        amounts = {name: amount for name, amount in self.resources.items() if name == resource}
        return Demand(self.name, self.role, amounts)


def shortage(demands: Sequence[Demand], nodes: Sequence[dict[str, float]]) -> str | None:
    """What `nodes` (each its total resources) lack for `demands`, in words; None when nothing is missing in total."""
    lacking = []
    for resource in sorted({resource for demand in demands for resource in demand.resources}):
        asked = sum(demand.resources.get(resource, 0.0) for demand in demands)
        present = sum(node.get(resource, 0.0) for node in nodes)
        if asked > present + 1e-9:
            lacking.append(f"{_amount(asked)} {resource} ({_amount(present)} present)")
    if lacking:
        return f"{len(demands)} workers ask for {' and '.join(lacking)}"
    for demand in demands:
        if not any(_fits(demand.resources, node) for node in nodes):
            return f"no single node has what {demand.name} asks for: {describe(demand.resources)}"
    return None


def refuse_shortage(demands: Sequence[Demand], nodes: Sequence[dict[str, float]]) -> None:
    """Refuse what cannot be placed.

    Raises:
        ResourcesError: naming what is missing.
    """
    reason = shortage(demands, nodes)
    if reason is not None:
        raise ResourcesError(
            f"Ray does not have the resources: {reason}; use fewer workers (--prefill, --decode), "
            "reserve less for each (prefill.num_cpus, decode.num_cpus, …), or add nodes"
        )


def describe(resources: dict[str, float]) -> str:
    """Resources in words."""
    return ", ".join(f"{_amount(amount)} {name}" for name, amount in resources.items()) or "nothing"


def _fits(resources: dict[str, float], node: dict[str, float]) -> bool:
    return all(node.get(name, 0.0) + 1e-9 >= amount for name, amount in resources.items())


def _amount(amount: float) -> str:
    return f"{amount:g}"


def demands(settings: Settings) -> list[Demand]:
    """The demands of all workers; gateways reserve nothing."""
    pools: tuple[tuple[Role, PoolSettings], ...] = (("prefill", settings.prefill), ("decode", settings.decode))
    return [
        Demand(f"{role}-{index}", role, _resources(pool, settings.engine.compute_threads))
        for role, pool in pools
        for index in range(pool.count)
    ]


def _resources(pool: PoolSettings, compute_threads: int) -> dict[str, float]:
    cpus = compute_threads / 2 if pool.num_cpus is None else pool.num_cpus
    amounts = {"CPU": cpus, "GPU": pool.num_gpus, **pool.resources}
    return {name: amount for name, amount in amounts.items() if amount > 0}
