"""A decode worker whose answers are scripted; its gRPC server is the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from rpc.address import WorkerAddress
from rpc.server import RpcServer
from rpc.v1 import common_pb2, generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.worker_service import NAME as WORKER_SERVICE
from rpc.worker_service import WorkerService

TOKEN = "a cluster's secret"
# Larger than the tokenizer's, as models have it.
VOCAB_SIZE = 512
SERVICE = generate_pb2.DESCRIPTOR.services_by_name["Generate"].full_name
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH

Chunks: TypeAlias = AsyncGenerator[generate_pb2.GenerateChunk, None]
Script: TypeAlias = Callable[[generate_pb2.GenerateRequest], Chunks]


class Refusal(Exception):
    """Raised by a script: the call ends with this status."""

    def __init__(self, code: grpc.StatusCode, details: str = "scripted") -> None:
        super().__init__(details)
        self.code = code
        self.details = details


def chunk(*token_ids: int, finish: Any = common_pb2.FINISH_REASON_UNSPECIFIED) -> generate_pb2.GenerateChunk:
    return generate_pb2.GenerateChunk(token_ids=token_ids, finish_reason=finish)


def says(token_ids: list[int]) -> Script:
    """Draw these tokens, one a message and over again, until a stop token of the request's or its maximum."""

    async def script(request: generate_pb2.GenerateRequest) -> Chunks:
        for drawn in range(1, request.max_tokens + 1):
            token_id = token_ids[(drawn - 1) % len(token_ids)]
            finish = common_pb2.FINISH_REASON_UNSPECIFIED
            if token_id in request.stop_token_ids:
                finish = STOP
            elif drawn == request.max_tokens:
                finish = LENGTH
            yield chunk(token_id, finish=finish)
            if finish:
                return

    return script


def refuses(code: grpc.StatusCode, details: str = "scripted", after: tuple[int, ...] = ()) -> Script:
    """Draw the tokens in `after`, then end the call with `code`."""

    async def script(request: generate_pb2.GenerateRequest) -> Chunks:
        for token_id in after:
            yield chunk(token_id)
        raise Refusal(code, details)

    return script


class Held:
    """A script that draws a token for every `release`, and knows whether it is running and whether it was cancelled."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._released: asyncio.Queue[None] = asyncio.Queue()
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()

    def release(self, tokens: int = 1) -> None:
        """Let this many tokens be drawn."""
        for _ in range(tokens):
            self._released.put_nowait(None)

    async def __call__(self, request: generate_pb2.GenerateRequest) -> Chunks:
        self.called.set()
        try:
            for drawn in range(1, request.max_tokens + 1):
                await self._released.get()
                last = drawn == request.max_tokens
                yield chunk(self._token_id, finish=LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED)
        except (asyncio.CancelledError, GeneratorExit):
            # The second where the call is cancelled while a message of it is being sent.
            self.cancelled.set()
            raise


class FakeDecodeWorker(generate_pb2_grpc.GenerateServicer):
    """`script` answers requests, `probe_script` the gateway's probes. What came is in `requests` and `probes`."""

    def __init__(self, name: str = "decode-0", max_model_len: int = 256, role: str = "decode") -> None:
        self.name = name
        self.description = worker_pb2.WorkerDescription(
            engine_id=common_pb2.EngineId(name=name, incarnation=7),
            role=role,
            model="tiny",
            dtype="float32",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
        )
        self.status = worker_pb2.WorkerStatus(
            engine_id=self.description.engine_id, role=role, state="READY", blocks_total=64, blocks_free=60
        )
        self.may_tell_status = asyncio.Event()
        self.may_tell_status.set()
        self.script: Script = says([0])
        self.probe_script: Script = says([0])
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.probes: list[generate_pb2.GenerateRequest] = []
        self._server: RpcServer | None = None
        self._port = 0

    async def start(self) -> WorkerAddress:
        """Listen; again on the same port after a `stop`."""
        self._server = RpcServer("127.0.0.1", self._port, TOKEN)
        generate_pb2_grpc.add_GenerateServicer_to_server(self, self._server.server)
        worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(self), self._server.server)
        rpc = await self._server.start([SERVICE, WORKER_SERVICE])
        self._port = int(rpc.rpartition(":")[2])
        return self.address

    @property
    def address(self) -> WorkerAddress:
        """Where it is, once it has been started."""
        return WorkerAddress(
            name=self.name,
            role=self.description.role,
            incarnation=self.description.engine_id.incarnation,
            rpc=f"127.0.0.1:{self._port}",
            connector_host="127.0.0.1",
            connector_port=1,
            pid=1,
            host="127.0.0.1",
        )

    async def stop(self) -> None:
        """Cancel what is running and let go of the port."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Generate(
        self,
        request: generate_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateChunk],
    ) -> Chunks:
        """Follow the script."""
        probe = request.request_id.startswith("probe-")
        (self.probes if probe else self.requests).append(request)
        try:
            async with aclosing((self.probe_script if probe else self.script)(request)) as parts:
                async for part in parts:
                    yield part
        except Refusal as refusal:
            await context.abort(refusal.code, refusal.details)


class _Worker(WorkerService):
    """The real service, which can be made to keep silent."""

    def __init__(self, fake: FakeDecodeWorker) -> None:
        super().__init__(lambda: fake.description, lambda: fake.status)
        self._fake = fake

    async def Status(
        self, request: worker_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerStatus:
        """See worker.proto."""
        await self._fake.may_tell_status.wait()
        return await super().Status(request, context)
