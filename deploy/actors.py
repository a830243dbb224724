"""The Ray actors: a room's class in a process of its own.

They carry no logic. An actor's process is prepared (its output goes to its log file), the room's package is imported
there and nowhere else, and calls are passed on. The owner never loads torch, so only types from here and from `rpc`
go back to it. Errors come back as `StartFailed`, whose message is all that it needs; the traceback is in the log.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import ray

from decode import DecodeConfig
from deploy.errors import StartFailed
from deploy.output import redirect_output
from gateway.config import GatewayConfig
from prefill import PrefillConfig
from rpc.address import WorkerAddress

if TYPE_CHECKING:
    from decode import DecodeWorker
    from gateway import Gateway
    from prefill import PrefillWorker

AnyWorkerConfig: TypeAlias = PrefillConfig | DecodeConfig

FAILURE_POLL_S = 0.5

logger = logging.getLogger(__name__)


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's process needs to know. A `host` of "" in `config` is the address of the node that it runs on."""

    config: AnyWorkerConfig
    log_file: str
    log_level: str


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway's process needs to know."""

    name: str
    config: GatewayConfig
    log_file: str
    log_level: str


class Link(msgspec.Struct, frozen=True):
    """A way for pages: which decode worker reads from which prefill worker, how, and how fast (10^9 bytes a second)."""

    decode: str
    prefill: str
    transport: str
    gb_per_s: float


class WorkerActor:
    """A prefill or a decode worker."""

    def __init__(self, spec: WorkerSpec) -> None:
        redirect_output(Path(spec.log_file), spec.log_level)
        self._config = on_this_node(spec.config)
        self._worker: PrefillWorker | DecodeWorker | None = None

    async def phase(self) -> str:
        """What the worker is doing, in words."""
        return "importing the engine" if self._worker is None else self._worker.phase

    async def start(self) -> WorkerAddress:
        """Build and start the worker."""
        with errors_for_the_owner(self._config.name):
            await asyncio.to_thread(importlib.import_module, "worker.core")
            self._worker = build_worker(self._config)
            return await self._worker.start()

    async def set_prefill_workers(self, workers: list[WorkerAddress]) -> list[Link]:
        """Connect a decode worker to the prefill pool."""
        from decode import DecodeWorker

        with errors_for_the_owner(self._config.name):
            assert isinstance(self._worker, DecodeWorker)
            links = await self._worker.set_prefill_workers(workers)
            return [Link(self._config.name, link.name, link.transport, link.gb_per_s) for link in links]

    async def stop(self, grace_s: float) -> None:
        """Finish what is in flight for up to `grace_s`, then stop."""
        if self._worker is not None:
            await self._worker.stop(grace_s)

    async def watch(self) -> None:
        """Never returns: the call fails when the process ends, or when something in it has failed for good."""
        with errors_for_the_owner(self._config.name):
            await until_failure(lambda: None if self._worker is None else self._worker.failure)


class GatewayActor:
    """A gateway."""

    def __init__(self, spec: GatewaySpec) -> None:
        redirect_output(Path(spec.log_file), spec.log_level)
        self._spec = spec
        self._gateway: Gateway | None = None

    async def start(self) -> tuple[str, int]:
        """Build and start the gateway. Returns its URL and its process id."""
        with errors_for_the_owner(self._spec.name):
            await asyncio.to_thread(importlib.import_module, "gateway.gateway")
            from gateway import Gateway

            self._gateway = Gateway(self._spec.config)
            return await self._gateway.start(), os.getpid()

    async def set_decode_workers(self, workers: list[WorkerAddress]) -> None:
        """Tell the gateway where requests go."""
        with errors_for_the_owner(self._spec.name):
            assert self._gateway is not None
            await self._gateway.set_decode_workers(workers)

    async def stop(self, grace_s: float) -> None:
        """Finish what is in flight for up to `grace_s`, then stop."""
        if self._gateway is not None:
            await self._gateway.stop(grace_s)

    async def watch(self) -> None:
        """Never returns: the call fails when the process ends, or when the server in it has failed for good."""
        with errors_for_the_owner(self._spec.name):
            await until_failure(lambda: None if self._gateway is None else self._gateway.failure)


def on_this_node(config: AnyWorkerConfig) -> AnyWorkerConfig:
    """`config` with the address of this node, if it leaves that open: peers on other nodes come to it."""
    if config.host:
        return config
    address = ray.util.get_node_ip_address()
    connector = msgspec.structs.replace(config.connector, host=address)
    return msgspec.structs.replace(config, host=address, connector=connector)


def build_worker(config: AnyWorkerConfig) -> PrefillWorker | DecodeWorker:
    """The worker of that configuration; loads torch."""
    if isinstance(config, PrefillConfig):
        from prefill import PrefillWorker

        return PrefillWorker(config)
    from decode import DecodeWorker

    return DecodeWorker(config)


async def until_failure(failure: Callable[[], BaseException | None], poll_s: float = FAILURE_POLL_S) -> None:
    """Look every `poll_s` until there is one.

    Raises:
        StartFailed: with the failure.
    """
    while True:
        await asyncio.sleep(poll_s)
        if (found := failure()) is not None:
            break
    raise StartFailed(f"has failed: {str(found) or type(found).__name__}") from found


@contextmanager
def errors_for_the_owner(name: str) -> Iterator[None]:
    """Log whatever goes wrong, and pass on a message that survives the way to the owner."""
    try:
        yield
    except Exception as error:
        logger.exception("%s failed", name)
        raise StartFailed(f"{name}: {str(error) or type(error).__name__}") from None
