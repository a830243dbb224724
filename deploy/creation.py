"""Creates the actors of a run in their reserved places."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from decode import DecodeConfig
from deploy.actors import GatewayActor, GatewaySpec, WorkerActor, WorkerSpec
from deploy.demand import Demand, demands
from deploy.member import Member
from deploy.model.resolve import ResolvedModel
from deploy.placement import Reservation
from deploy.ports import gateway_ports
from deploy.processes import session_environment
from deploy.settings import Settings
from gateway.config import GatewayConfig
from prefill import PrefillConfig


class Run(NamedTuple):
    """What all members of one run share. `token` is their common secret, `session` marks their processes."""

    settings: Settings
    model: ResolvedModel
    token: str
    session: str
    logs: Path


class Members(NamedTuple):
    """The actors, by what they are."""

    prefill: list[Member]
    decode: list[Member]
    gateways: list[Member]


def create_members(run: Run, reservation: Reservation) -> Members:
    """Create every actor; returns at once, while Ray starts their processes."""
    members = Members([], [], [])
    for demand in demands(run.settings):
        pool = members.prefill if demand.role == "prefill" else members.decode
        pool.append(_create_worker(run, demand, reservation))
    for index, port in enumerate(gateway_ports(run.settings.gateway)):
        members.gateways.append(_create_gateway(run, f"gateway-{index}", port))
    return members


def _create_worker(run: Run, demand: Demand, reservation: Reservation) -> Member:
    log_file = run.logs / f"{demand.name}.log"
    spec = WorkerSpec(config=_worker_config(run, demand), log_file=str(log_file), log_level=run.settings.log.level)
    custom = {name: amount for name, amount in demand.resources.items() if name not in ("CPU", "GPU")}
    options: dict[str, Any] = {
        "num_cpus": demand.resources.get("CPU", 0),
        "num_gpus": demand.resources.get("GPU", 0),
        "resources": custom,
        "scheduling_strategy": reservation.strategy(demand.name),
        "max_restarts": 0,
        "runtime_env": {"env_vars": _environment(run)},
    }
    return Member(demand.name, ray.remote(WorkerActor).options(**options).remote(spec), log_file)


def _create_gateway(run: Run, name: str, port: int) -> Member:
    log_file = run.logs / f"{name}.log"
    config = GatewayConfig(
        port=port,
        model_path=str(run.model.path),
        served_name=run.model.served_name,
        token=run.token,
        **own_settings(run.settings.gateway, GatewayConfig, "port"),
    )
    spec = GatewaySpec(name=name, config=config, log_file=str(log_file), log_level=run.settings.log.level)
    options: dict[str, Any] = {
        "num_cpus": 0,
        # People reach the gateways at an address of this machine, so that is where they run.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        "max_restarts": 0,
        "runtime_env": {"env_vars": _environment(run)},
    }
    return Member(name, ray.remote(GatewayActor).options(**options).remote(spec), log_file)


def _worker_config(run: Run, demand: Demand) -> PrefillConfig | DecodeConfig:
    settings = run.settings
    shared: dict[str, Any] = {
        "name": demand.name,
        "host": "" if settings.ray.address else settings.connector.host,
        "model_path": str(run.model.path),
        "engine": settings.engine,
        "connector": settings.connector,
        "token": run.token,
    }
    if demand.role == "prefill":
        return PrefillConfig(**shared, **own_settings(settings.prefill, PrefillConfig))
    return DecodeConfig(**shared, **own_settings(settings.decode, DecodeConfig))


def own_settings(settings: msgspec.Struct, room: type[msgspec.Struct], *except_for: str) -> dict[str, Any]:
    """What `settings` has of the fields of a room's own configuration."""
    names = set(settings.__struct_fields__).intersection(room.__struct_fields__).difference(except_for)
    return {name: getattr(settings, name) for name in names}


def _environment(run: Run) -> dict[str, str]:
    threads = str(run.settings.engine.compute_threads)
    return {
        **session_environment(run.session),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Threads that spin while they wait take the cores away from the other workers of the machine.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
