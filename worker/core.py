"""The parts of a worker, opened in order and closed in the opposite one.

`open` loads the model and makes the pool reachable for peers; `serve` publishes the worker. Everything but the engine's
own thread runs on one event loop. Slow calls (loading, closing) run on threads, so that the loop always answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import grpc

from connector import CompatibilityRecord, Connector, Endpoint, EngineId, Memory, new_engine_id
from engine import Engine, EngineClosed, ModelInfo, inspect_model
from rpc.address import WorkerAddress
from rpc.errors import CallRefused
from rpc.server import RpcServer
from rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from rpc.worker_service import NAME as WORKER_SERVICE
from rpc.worker_service import WorkerService
from worker.config import WorkerConfig
from worker.transferable import require_transferable

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]


class WorkerCore:
    """See the module. `counters` are the role's own; the worker's status adds the connector's and the engine's.
    `requests_ahead` are requests of this worker that its engine has not been given yet."""

    def __init__(self, config: WorkerConfig, role: Role) -> None:
        self.config = config
        self.role: Role = role
        self.engine_id: EngineId = new_engine_id(config.name)
        self.phase = "starting"
        self.state: Literal["STARTING", "READY", "DRAINING"] = "STARTING"
        self.counters: Counter[str] = Counter()
        self.requests_ahead = 0
        self._closed = False
        self._info: ModelInfo | None = None
        self._engine: Engine | None = None
        self._connector: Connector | None = None
        self._endpoint: Endpoint | None = None
        self._server: RpcServer | None = None

    @property
    def info(self) -> ModelInfo:
        """The model, once `open` has returned."""
        assert self._info is not None
        return self._info

    @property
    def engine(self) -> Engine:
        """The engine, once `open` has returned."""
        assert self._engine is not None
        return self._engine

    @property
    def connector(self) -> Connector:
        """The connector, once `open` has returned."""
        assert self._connector is not None
        return self._connector

    @property
    def failure(self) -> BaseException | None:
        """What broke for good while it ran: the engine's thread, or the connector. The process has to be replaced."""
        parts = [part for part in (self._engine, self._connector) if part is not None]
        return next((part.failure for part in parts if part.failure is not None), None)

    async def open(self) -> None:
        """Load the model, allocate and register the pool, take the connector's port, start to compute.

        Raises:
            ModelError, EngineError, ConnectorError: whatever stands in the way, among it a stop meanwhile; what was
                opened has been closed.
        """
        config = self.config
        try:
            self.phase = "looking at the model"
            self._info = await asyncio.to_thread(inspect_model, Path(config.model_path))
            require_transferable(self._info, config.engine)
            engine = self._engine = await self._load(self._info)
            self.phase = "registering pages"
            memory = engine.memory
            self._connector = Connector(
                config.connector,
                self.engine_id,
                Memory(address=memory.address, length=memory.length, fd=memory.fd),
                engine.geometry,
                _compatibility(self._info, config, engine),
                config.token.encode(),
            )
            self._endpoint = await self._connector.start()
            self._require_open()
            engine.start()
        except BaseException:
            await self.close()
            raise

    async def serve(self, add_services: Callable[[grpc.aio.Server], None], services: Sequence[str]) -> WorkerAddress:
        """Answer on gRPC: the services that `add_services` adds (`services` are their full names), and `Worker`.

        Raises:
            BindError: the port is busy; what was opened has been closed.
            EngineClosed: the worker was stopped meanwhile.
        """
        assert self._endpoint is not None
        try:
            self._require_open()
            self._server = RpcServer(self.config.host, self.config.rpc_port, self.config.token)
            add_services(self._server.server)
            worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(self.describe, self.status), self._server.server)
            address = await self._server.start([*services, WORKER_SERVICE])
            self._require_open()
        except BaseException:
            await self.close()
            raise
        self.phase, self.state = "ready", "READY"
        logger.info("%s answers on %s, pages on %s", self.engine_id, address, self._endpoint)
        return WorkerAddress(
            name=self.config.name,
            role=self.role,
            incarnation=self.engine_id.incarnation,
            rpc=address,
            connector_host=self._endpoint.host,
            connector_port=self._endpoint.port,
            pid=os.getpid(),
            host=self.config.host,
        )

    async def drain(self) -> None:
        """Say that no new work is taken. Refusing it is the service's part."""
        self.state, self.phase = "DRAINING", "draining"
        if self._server is not None:
            await self._server.drain()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no source is computed or held any more; False when that took longer than `timeout_s`."""
        return self._connector is None or await self._connector.sources.drained(timeout_s)

    async def stop_answering(self) -> None:
        """Refuse new calls and cancel the running ones. Twice is harmless."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0.0)

    async def close(self) -> None:
        """Stop answering, settle every transfer, stop computing, give everything back. Twice is harmless."""
        self._closed = True
        async with contextlib.AsyncExitStack() as every:  # in reverse; one that fails does not keep the others
            if self._engine is not None:
                every.push_async_callback(asyncio.to_thread, self._engine.close)
            if self._connector is not None:
                every.push_async_callback(self._connector.close)
            every.push_async_callback(self.stop_answering)

    def require_ready(self) -> None:
        """Refuse work that cannot be finished here.

        Raises:
            CallRefused: UNAVAILABLE, while it starts or drains, and for ever once something in it has failed.
        """
        if (failure := self.failure) is not None:
            raise CallRefused(
                grpc.StatusCode.UNAVAILABLE, f"{self.engine_id} has failed ({failure!r}); use another worker"
            )
        if self.state != "READY":
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, f"{self.engine_id} is {self.state}; use another worker")

    def describe(self) -> worker_pb2.WorkerDescription:
        """See worker.proto."""
        return worker_pb2.WorkerDescription(
            engine_id=as_message(self.engine_id),
            role=self.role,
            model=self.info.path.name,
            dtype=self.config.engine.dtype,
            max_model_len=self.engine.max_model_len,
            vocab_size=self.info.vocab_size,
        )

    def status(self) -> worker_pb2.WorkerStatus:
        """See worker.proto."""
        engine, connector = self.engine.stats(), self.connector.stats()
        counters = self.counters + Counter(connector.counters)
        counters["tokens_computed"] = engine.tokens_computed
        counters["prompt_tokens_computed"] = engine.prompt_tokens_computed
        counters["engine_steps"] = engine.steps
        counters["preemptions"] = engine.preemptions
        return worker_pb2.WorkerStatus(
            engine_id=as_message(self.engine_id),
            role=self.role,
            state=self.state,
            pid=os.getpid(),
            host=socket.gethostname(),
            blocks_total=engine.blocks_total,
            blocks_free=engine.blocks_free,
            sources_held=connector.sources_held,
            imports_active=connector.imports_active,
            blocks_quarantined=connector.blocks_quarantined,
            requests_running=engine.running,
            requests_waiting=engine.waiting + self.requests_ahead,
            peers=[
                worker_pb2.PeerStatus(name=link.name, transport=link.transport, gb_per_s=link.gb_per_s)
                for link in connector.links
            ],
            counters=counters,
        )

    async def _load(self, info: ModelInfo) -> Engine:
        """Loading cannot be interrupted: an engine that nobody waits for any more is closed when it comes."""
        loading = asyncio.ensure_future(asyncio.to_thread(Engine, info, self.config.engine, self._set_phase))
        try:
            engine = await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(_close_unwanted)
            raise
        try:
            self._require_open()
        except EngineClosed:
            engine.close()
            raise
        return engine

    def _require_open(self) -> None:
        if self._closed or self.state == "DRAINING":
            raise EngineClosed(f"{self.engine_id} was stopped while it started")

    def _set_phase(self, phase: str) -> None:
        self.phase = phase


def _close_unwanted(loading: asyncio.Future[Engine]) -> None:
    if loading.cancelled():
        return
    if (error := loading.exception()) is not None:
        logger.info("a model that is not wanted any more could not be loaded: %s", error)
    else:
        loading.result().close()


def as_message(engine_id: EngineId) -> common_pb2.EngineId:
    """An engine id on the wire."""
    return common_pb2.EngineId(name=engine_id.name, incarnation=engine_id.incarnation)


def _compatibility(info: ModelInfo, config: WorkerConfig, engine: Engine) -> CompatibilityRecord:
    return CompatibilityRecord(
        model_fingerprint=info.fingerprint,
        dtype=config.engine.dtype,
        cache_dtype=config.engine.dtype,
        layout=config.engine.layout,
        block_size=config.engine.block_size,
        groups=engine.groups,
        mode=config.connector.mode,
    )
