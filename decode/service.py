"""The `Generate` service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

import grpc

from decode.config import DecodeConfig
from decode.peers import Peers
from decode.request import Request
from decode.reservations import Reservations
from decode.stages import Stage
from rpc.errors import CallRefused
from rpc.v1 import generate_pb2, generate_pb2_grpc
from worker import WorkerCore
from worker.validation import check_prompt, check_sampling

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""For handlers to end that were cancelled; they do so at once."""

NAME = generate_pb2.DESCRIPTOR.services_by_name["Generate"].full_name


class GenerateService(generate_pb2_grpc.GenerateServicer):
    """See generate.proto. Knows every request in flight, and what is still being released after one."""

    def __init__(self, core: WorkerCore, config: DecodeConfig, peers: Peers, reservations: Reservations) -> None:
        self._core = core
        self._config = config
        self._peers = peers
        self._reservations = reservations
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._background: set[asyncio.Future[None]] = set()

    async def Generate(  # type: ignore[override]  # a coroutine that writes, rather than a generator
        self,
        request: generate_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateChunk],
    ) -> None:
        """Serve one request to its end."""
        outcome = "cancelled"
        self._in_flight += 1
        self._idle.clear()
        try:
            await self._generate(request, context)
            outcome = "finished"
        except CallRefused as refused:
            outcome = refused.code.name.lower()
            logger.info("request %s ended early: %s", request.request_id, refused)
            await context.abort(refused.code, str(refused))
        except Exception as error:
            outcome = "internal"
            logger.exception("request %s failed", request.request_id)
            await context.abort(grpc.StatusCode.INTERNAL, f"a mistake of the decode worker: {error!r}")
        finally:
            self._core.counters[f"requests_{outcome}"] += 1
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False when that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Wait for handlers that were cancelled, and for what is still being released; each has its own deadline."""
        if not await self.drained(CLOSE_S):
            logger.error("%d cancelled requests do not end", self._in_flight)
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    async def _generate(
        self,
        message: generate_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateChunk],
    ) -> None:
        self._check(message)
        request = Request(message, self._core, self._config, self._peers, self._reservations, self._run_in_background)
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                await request.run(context.write)
        except TimeoutError as error:
            raise CallRefused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the request took longer than decode.request_timeout_s = {self._config.request_timeout_s:g} s",
            ) from error
        finally:
            request.stages.reach(Stage.ENDED)
            logger.info("request %s, transfer %s: %s", message.request_id, request.transfer_id, request.stages.tell())

    def _check(self, message: generate_pb2.GenerateRequest) -> None:
        core = self._core
        core.require_ready()
        if self._in_flight > self._config.max_requests:
            raise CallRefused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{core.engine_id} has {self._config.max_requests} requests in flight (decode.max_requests); "
                "try again later",
            )
        check_prompt(
            message.prompt_token_ids,
            message.max_tokens,
            vocab_size=core.info.vocab_size,
            max_model_len=core.engine.max_model_len,
        )
        check_sampling(message.sampling)

    def _run_in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._released)

    def _released(self, task: asyncio.Future[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a source could not be released", exc_info=error)
