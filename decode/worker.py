"""The decode worker as a whole."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from decode.config import DecodeConfig
from decode.peers import PeerLink, Peers
from decode.reservations import Reservations
from decode.service import NAME, GenerateService
from rpc.address import WorkerAddress
from rpc.v1 import generate_pb2_grpc
from worker import WorkerCore

logger = logging.getLogger(__name__)


class DecodeWorker:
    """`start` once, `set_prefill_workers` whenever the pool changes, `stop` once."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._core = WorkerCore(config, "decode")
        self._peers: Peers | None = None
        self._service: GenerateService | None = None

    @property
    def phase(self) -> str:
        """What it is doing, in words."""
        return self._core.phase

    @property
    def failure(self) -> BaseException | None:
        """What broke for good while it ran; None while it works."""
        return self._core.failure

    async def start(self) -> WorkerAddress:
        """Load the model, register the pages, answer.

        Raises:
            ModelError, EngineError, ConnectorError, BindError: whatever stands in the way.
        """
        core = self._core
        await core.open()
        reservations = Reservations(core.engine)
        core.engine.on_blocks_freed(reservations.blocks_freed)
        self._peers = Peers(core.connector, core.engine, self._config.token)
        self._service = service = GenerateService(core, self._config, self._peers, reservations)
        return await core.serve(
            lambda server: generate_pb2_grpc.add_GenerateServicer_to_server(service, server), [NAME]
        )

    async def set_prefill_workers(self, workers: Sequence[WorkerAddress]) -> list[PeerLink]:
        """Link to the prefill pool, and measure each new link.

        Raises:
            ConnectorError: a worker cannot be linked to.
        """
        assert self._peers is not None
        return await self._peers.set(workers)

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end within `grace_s`, then close."""
        await self._core.drain()
        if self._service is not None and not await self._service.drained(grace_s):
            logger.warning("%s stops with requests in flight", self._core.engine_id)
        async with contextlib.AsyncExitStack() as every:  # in reverse; one that fails does not keep the others
            every.push_async_callback(self._core.close)
            if self._peers is not None:
                every.push_async_callback(self._peers.close)
            if self._service is not None:
                every.push_async_callback(self._service.close)
            every.push_async_callback(self._core.stop_answering)
