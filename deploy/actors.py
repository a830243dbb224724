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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import ray

from connector.config import ConnectorConfig
from deploy.errors import StartFailed
from deploy.output import redirect_output
from engine.config import EngineConfig
from rpc.address import WorkerAddress

if TYPE_CHECKING:
    from decode import DecodeWorker
    from gateway import Gateway
    from prefill import PrefillWorker

logger = logging.getLogger(__name__)


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's process needs to know. `host` "" is the address of the node that it runs on."""

    name: str
    role: Literal["prefill", "decode"]
    host: str
    model_path: str
    engine: EngineConfig
    connector: ConnectorConfig
    token: str
    log_file: str
    log_level: str


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway's process needs to know."""

    name: str
    host: str
    port: int
    model_path: str
    served_name: str
    token: str
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
        self._spec = spec
        self._worker: PrefillWorker | DecodeWorker | None = None

    async def phase(self) -> str:
        """What the worker is doing, in words."""
        return "importing the engine" if self._worker is None else self._worker.phase

    async def start(self) -> WorkerAddress:
        """Build and start the worker."""
        with errors_for_the_owner(self._spec.name):
            await asyncio.to_thread(importlib.import_module, self._spec.role)
            self._worker = self._build()
            return await self._worker.start()

    async def set_prefill_workers(self, workers: list[WorkerAddress]) -> list[Link]:
        """Connect a decode worker to the prefill pool."""
        with errors_for_the_owner(self._spec.name):
            links = await self._decode_worker().set_prefill_workers(workers)
            return [Link(self._spec.name, link.name, link.transport, link.gb_per_s) for link in links]

    async def stop(self, grace_s: float) -> None:
        """Finish what is in flight for up to `grace_s`, then stop."""
        if self._worker is not None:
            await self._worker.stop(grace_s)

    async def watch(self) -> None:
        """Never returns: the call fails when the process ends."""
        await asyncio.Event().wait()

    def _build(self) -> PrefillWorker | DecodeWorker:
        spec = self._spec
        host = spec.host or ray.util.get_node_ip_address()
        connector = msgspec.structs.replace(spec.connector, host=host)
        if spec.role == "prefill":
            from prefill import PrefillConfig, PrefillWorker

            return PrefillWorker(
                PrefillConfig(
                    name=spec.name,
                    host=host,
                    model_path=spec.model_path,
                    engine=spec.engine,
                    connector=connector,
                    token=spec.token,
                )
            )
        from decode import DecodeConfig, DecodeWorker

        return DecodeWorker(
            DecodeConfig(
                name=spec.name,
                host=host,
                model_path=spec.model_path,
                engine=spec.engine,
                connector=connector,
                token=spec.token,
            )
        )

    def _decode_worker(self) -> DecodeWorker:
        from decode import DecodeWorker

        assert isinstance(self._worker, DecodeWorker)
        return self._worker


class GatewayActor:
    """A gateway."""

    def __init__(self, spec: GatewaySpec) -> None:
        redirect_output(Path(spec.log_file), spec.log_level)
        self._spec = spec
        self._gateway: Gateway | None = None

    async def start(self) -> tuple[str, int]:
        """Build and start the gateway. Returns its URL and its process id."""
        with errors_for_the_owner(self._spec.name):
            await asyncio.to_thread(importlib.import_module, "gateway")
            from gateway import Gateway, GatewayConfig

            self._gateway = Gateway(
                GatewayConfig(
                    host=self._spec.host,
                    port=self._spec.port,
                    model_path=self._spec.model_path,
                    served_name=self._spec.served_name,
                    token=self._spec.token,
                )
            )
            return await self._gateway.start(), os.getpid()

    async def set_decode_workers(self, workers: list[WorkerAddress]) -> None:
        """Tell the gateway where requests go."""
        with errors_for_the_owner(self._spec.name):
            assert self._gateway is not None
            await self._gateway.set_decode_workers(workers)

    async def stop(self, grace_s: float) -> None:
        """Finish what is in flight for up to `grace_s`, then stop."""
        if self._gateway is not None:
            await self._gateway.stop()

    async def watch(self) -> None:
        """Never returns: the call fails when the process ends."""
        await asyncio.Event().wait()


@contextmanager
def errors_for_the_owner(name: str) -> Iterator[None]:
    """Log whatever goes wrong, and pass on a message that survives the way to the owner."""
    try:
        yield
    except Exception as error:
        logger.exception("%s failed", name)
        raise StartFailed(f"{name}: {error or type(error).__name__}") from None
