"""A worker's gRPC server and the channel to it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rpc.channel import open_channel
from rpc.errors import BindError
from rpc.server import RpcServer
from rpc.v1 import generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.worker_service import NAME, WorkerService

DEADLINE_S = 20.0


class Generate(generate_pb2_grpc.GenerateServicer):
    """Counts what it was sent, then waits to be cancelled."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.running = 0
        self.cancelled = asyncio.Event()

    async def Generate(  # type: ignore[override]
        self,
        request: generate_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        self.lengths.append(len(request.prompt_token_ids))
        await context.write(generate_pb2.GenerateChunk(token_ids=[7]))
        if request.max_tokens == 1:
            return
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1
            self.cancelled.set()


class Running:
    """A server with a scripted `Generate` and a `Worker` service."""

    def __init__(self) -> None:
        self.generate = Generate()
        self.server = RpcServer("127.0.0.1", 0, "secret")
        generate_pb2_grpc.add_GenerateServicer_to_server(self.generate, self.server.server)
        service = WorkerService(
            lambda: worker_pb2.WorkerDescription(model="m", max_model_len=9),
            lambda: worker_pb2.WorkerStatus(state="READY", blocks_free=3),
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self.server.server)
        self.address = ""


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    one = Running()
    one.address = await one.server.start([NAME])
    yield one
    await one.server.stop(0.0)


async def test_the_token_opens_every_kind_of_call(running: Running) -> None:
    async with open_channel(running.address, "secret") as channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        assert (await worker.Describe(worker_pb2.DescribeRequest(), timeout=DEADLINE_S)).max_model_len == 9
        assert (await worker.Status(worker_pb2.StatusRequest(), timeout=DEADLINE_S)).blocks_free == 3
        call = generate_pb2_grpc.GenerateStub(channel).Generate(
            generate_pb2.GenerateRequest(max_tokens=1), timeout=DEADLINE_S
        )
        assert [list(chunk.token_ids) async for chunk in call] == [[7]]


@pytest.mark.parametrize("token", ["", "secre", "secret2", "sécret"])
async def test_without_the_token_no_call_is_answered(running: Running, token: str) -> None:
    metadata = (("authorization", f"Bearer {token}"),) if token.isascii() else ()
    async with grpc.aio.insecure_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await worker_pb2_grpc.WorkerStub(channel).Status(
                worker_pb2.StatusRequest(), timeout=DEADLINE_S, metadata=metadata
            )
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in generate_pb2_grpc.GenerateStub(channel).Generate(
                generate_pb2.GenerateRequest(), timeout=DEADLINE_S, metadata=metadata
            ):
                pass
    assert unary.value.code() is stream.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert running.generate.lengths == []


async def test_health_needs_no_token(running: Running) -> None:
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await running.server.drain()
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_cancelling_a_call_cancels_its_handler(running: Running) -> None:
    async with open_channel(running.address, "secret") as channel:
        call = generate_pb2_grpc.GenerateStub(channel).Generate(
            generate_pb2.GenerateRequest(max_tokens=5), timeout=DEADLINE_S
        )
        async for _ in call:
            call.cancel()
            break
        async with asyncio.timeout(DEADLINE_S):
            await running.generate.cancelled.wait()


async def test_a_cancelled_task_cancels_its_call_and_the_handler(running: Running) -> None:
    got = asyncio.Event()
    async with open_channel(running.address, "secret") as channel:
        stub = generate_pb2_grpc.GenerateStub(channel)

        async def read() -> None:
            async for _ in stub.Generate(generate_pb2.GenerateRequest(max_tokens=5), timeout=DEADLINE_S):
                got.set()

        task = asyncio.create_task(read())
        async with asyncio.timeout(DEADLINE_S):
            await got.wait()
            task.cancel()
            await running.generate.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("turns", range(12))
async def test_a_call_can_be_cancelled_at_any_moment(running: Running, turns: int) -> None:
    """What decode and gateway rely on: a cancelled task alone does not cancel a call that is still being made."""
    async with open_channel(running.address, "secret") as channel:
        stub = generate_pb2_grpc.GenerateStub(channel)

        async def read() -> None:
            call = stub.Generate(generate_pb2.GenerateRequest(max_tokens=5), timeout=DEADLINE_S)
            try:
                async for _ in call:
                    pass
            finally:
                call.cancel()

        task = asyncio.create_task(read())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(DEADLINE_S):
            async for _ in stub.Generate(generate_pb2.GenerateRequest(max_tokens=1), timeout=DEADLINE_S):
                pass  # on the same connection: what was sent before it has arrived
            while running.generate.running:
                await asyncio.sleep(0)


async def test_reflection_names_the_services_and_needs_the_token(running: Running) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")

    async def ask(channel: grpc.aio.Channel, **more: Any) -> list[str]:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([request]), timeout=DEADLINE_S, **more
        )
        return [service.name async for answer in call for service in answer.list_services_response.service]

    async with grpc.aio.insecure_channel(running.address) as channel:
        assert NAME in await ask(channel, metadata=(("authorization", "Bearer secret"),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(channel)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_prompt_of_a_million_tokens_passes(running: Running) -> None:
    async with open_channel(running.address, "secret") as channel:
        call = generate_pb2_grpc.GenerateStub(channel).Generate(
            generate_pb2.GenerateRequest(prompt_token_ids=range(1_000_000), max_tokens=1), timeout=DEADLINE_S
        )
        async for _ in call:
            pass
    assert running.generate.lengths == [1_000_000]


async def test_two_servers_never_share_a_port(running: Running) -> None:
    port = int(running.address.rpartition(":")[2])
    second = RpcServer("127.0.0.1", port, "secret")
    with pytest.raises(BindError, match=f"127.0.0.1:{port}"):
        await second.start([NAME])
    third = RpcServer("127.0.0.1", 0, "secret")
    try:
        assert await third.start([NAME]) != running.address
    finally:
        await third.stop(0.0)


async def test_a_port_that_somebody_else_listens_on_is_refused_with_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=str(port)):
            await RpcServer("127.0.0.1", port, "secret").start([NAME])


async def test_a_name_with_several_addresses_does_not_hide_that_the_port_is_busy() -> None:
    """gRPC alone is content with the other address of `localhost`, and clients then call whoever has the first one."""
    (_, _, _, _, (first, *_)), *_ = socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)
    family = socket.AF_INET6 if ":" in str(first) else socket.AF_INET
    with socket.create_server((str(first), 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=str(port)):
            await RpcServer("localhost", port, "secret").start([NAME])


async def test_what_is_told_is_the_address_that_was_taken() -> None:
    server = RpcServer("localhost", 0, "secret")
    try:
        host, _, port = (await server.start([])).rpartition(":")
        assert ipaddress.ip_address(host.strip("[]")).is_loopback
        with socket.create_connection((host.strip("[]"), int(port)), DEADLINE_S):
            pass
    finally:
        await server.stop(0.0)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("0.0.0.0", "wildcard"),
        ("::", "wildcard"),
        ("", "name an address"),
        ("no.such.host.invalid", "no.such.host.invalid"),
    ],
)
async def test_an_address_that_nobody_could_call_is_refused(host: str, says: str) -> None:
    with pytest.raises(BindError, match=says):
        await RpcServer(host, 0, "secret").start([NAME])


async def test_stopping_twice_and_without_a_start_is_harmless() -> None:
    server = RpcServer("127.0.0.1", 0, "secret")
    await server.stop(0.0)
    server = RpcServer("127.0.0.1", 0, "secret")
    await server.start([NAME])
    await server.stop(0.0)
    await server.stop(0.0)


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        RpcServer("127.0.0.1", 0, "")
