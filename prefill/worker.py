"""The prefill worker as a whole."""

from __future__ import annotations

import logging

from prefill.config import PrefillConfig
from prefill.service import NAME, PrefillService
from rpc.address import WorkerAddress
from rpc.v1 import prefill_pb2_grpc
from worker import WorkerCore

logger = logging.getLogger(__name__)


class PrefillWorker:
    """`start` once, `stop` once."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._core = WorkerCore(config, "prefill")

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
        await self._core.open()
        service = PrefillService(self._core, self._config)
        return await self._core.serve(
            lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(service, server), [NAME]
        )

    async def stop(self, grace_s: float) -> None:
        """Refuse new prompts, wait up to `grace_s` until all that is held was fetched or has expired, then close."""
        await self._core.drain()
        if not await self._core.drained(grace_s):
            logger.warning("%s stops with sources that nobody has fetched", self._core.engine_id)
        await self._core.close()
