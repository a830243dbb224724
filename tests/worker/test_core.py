"""A worker's parts: all of them open, or none stays open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from connector import ConnectorConfig, ListenerError
from engine import EngineConfig, EngineError, EngineRequest, ModelError, SamplingParams
from engine.loading import load_model
from engine.runner import forward
from rpc.channel import open_channel
from rpc.errors import BindError, CallRefused
from rpc.v1 import worker_pb2, worker_pb2_grpc
from tests.tiny_model import VOCAB_SIZE, save_tiny_model
from worker import WorkerConfig, WorkerCore

DEADLINE_S = 30.0
ENGINE = EngineConfig(dtype="float32", block_size=4, kv_cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield int(taken.getsockname()[1])


def config(
    model: Path, *, connector: ConnectorConfig | None = None, engine: EngineConfig = ENGINE, rpc_port: int = 0
) -> WorkerConfig:
    return WorkerConfig(
        name="worker-0",
        host="127.0.0.1",
        model_path=str(model),
        engine=engine,
        connector=connector or ConnectorConfig(transport="shm"),
        token="secret",
        rpc_port=rpc_port,
    )


def check_closed(core: WorkerCore) -> None:
    """The pool's descriptor is closed, the engine's thread has ended, nobody listens."""
    assert core.engine.memory.fd < 0
    check_no_thread()


def check_no_thread() -> None:
    assert "engine" not in {thread.name for thread in threading.enumerate()}


async def serve(core: WorkerCore) -> None:
    await core.open()
    await core.serve(lambda server: None, [])


async def test_an_open_worker_describes_itself(model: Path) -> None:
    core = WorkerCore(config(model), "decode")
    await core.open()
    try:
        address = await core.serve(lambda server: None, [])
        assert (address.name, address.role, address.pid) == ("worker-0", "decode", os.getpid())
        assert address.incarnation == core.engine_id.incarnation
        described, status = core.describe(), core.status()
        assert (described.vocab_size, described.max_model_len, described.dtype) == (VOCAB_SIZE, 512, "float32")
        assert status.state == "READY"
        assert status.blocks_free == status.blocks_total == core.engine.num_blocks
        assert status.counters["tokens_computed"] == 0
        await core.drain()
        assert core.status().state == "DRAINING"
    finally:
        await core.close()
        await core.close()
    check_closed(core)


async def test_a_busy_connector_port_closes_what_was_opened(model: Path, busy_port: int) -> None:
    core = WorkerCore(config(model, connector=ConnectorConfig(transport="shm", port=busy_port)), "prefill")
    with pytest.raises(ListenerError, match=str(busy_port)):
        await core.open()
    check_closed(core)


async def test_a_busy_grpc_port_closes_what_was_opened(model: Path, busy_port: int) -> None:
    core = WorkerCore(config(model, rpc_port=busy_port), "prefill")
    with pytest.raises(BindError, match=str(busy_port)):
        await serve(core)
    check_closed(core)


async def test_a_pool_without_room_for_a_block_is_refused(model: Path) -> None:
    core = WorkerCore(config(model, engine=EngineConfig(kv_cache_bytes=1)), "prefill")
    with pytest.raises(EngineError, match="kv_cache_bytes is 1"):
        await core.open()
    check_no_thread()


async def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        await WorkerCore(config(tmp_path / "nothing"), "prefill").open()
    check_no_thread()


class SlowLoading:
    """Loading a model waits until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.ended = threading.Event()

        def slow(*arguments: Any) -> Any:
            self.begun.set()
            try:
                assert self.go_on.wait(DEADLINE_S)
                return load_model(*arguments)
            finally:
                self.ended.set()

        monkeypatch.setattr("engine.assembly.load_model", slow)


def pools() -> int:
    """Descriptors of page pools that are open."""
    gc.collect()
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found += "kvferry-pool" in os.readlink(f"/proc/self/fd/{fd}")
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_a_start_that_is_cancelled_while_the_model_loads_leaves_no_pool(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that loads cannot be interrupted; what it brings has to be closed when it comes."""
    before = pools()
    loading = SlowLoading(monkeypatch)
    core = WorkerCore(config(model), "prefill")
    opening = asyncio.create_task(core.open())
    await asyncio.to_thread(loading.begun.wait, DEADLINE_S)
    opening.cancel()
    await asyncio.wait({opening}, timeout=DEADLINE_S)
    assert opening.cancelled()
    await core.close()  # at once: the thread still loads
    assert not loading.ended.is_set()
    del opening
    loading.go_on.set()
    await until(lambda: loading.ended.is_set() and pools() == before)
    check_no_thread()


async def test_a_worker_that_is_stopped_while_it_starts_does_not_come_up(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pools()
    loading = SlowLoading(monkeypatch)
    core = WorkerCore(config(model), "prefill")
    opening = asyncio.create_task(serve(core))
    await asyncio.to_thread(loading.begun.wait, DEADLINE_S)
    await core.drain()
    await core.close()
    loading.go_on.set()
    with pytest.raises(EngineError, match="was stopped while it started"):
        await opening
    assert core.state != "READY"
    del opening
    await until(lambda: pools() == before)
    check_no_thread()


async def test_it_answers_while_a_step_takes_long(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long step must not look like a dead worker."""
    core = WorkerCore(config(model), "decode")
    await core.open()
    inside, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        inside.set()
        assert go_on.wait(DEADLINE_S)
        return forward(*arguments)

    monkeypatch.setattr("engine.executor.forward", slow)
    try:
        address = await core.serve(lambda server: None, [])
        ended = threading.Event()
        core.engine.submit(
            EngineRequest(
                request_id="r",
                prompt_token_ids=[5, 6],
                sampling=SamplingParams(temperature=0.0),
                max_tokens=1,
                stop_token_ids=frozenset(),
                sink=lambda output: ended.set(),
            )
        )
        await asyncio.to_thread(inside.wait, DEADLINE_S)
        async with open_channel(address.rpc, "secret") as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            status = await stub.Status(worker_pb2.StatusRequest(), timeout=DEADLINE_S)
            assert (status.requests_running, status.blocks_total - status.blocks_free) == (1, 1)
            assert (await stub.Describe(worker_pb2.DescribeRequest(), timeout=DEADLINE_S)).role == "decode"
        assert not ended.is_set()
        go_on.set()
        assert await asyncio.to_thread(ended.wait, DEADLINE_S)
    finally:
        go_on.set()
        await core.close()


async def test_a_worker_says_why_it_takes_no_work(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = WorkerCore(config(model), "decode")
    with pytest.raises(CallRefused, match="is STARTING"):
        core.require_ready()
    try:
        await serve(core)
        core.require_ready()
        core.connector.failure = RuntimeError("the transport broke")
        with pytest.raises(CallRefused, match=r"has failed.*the transport broke") as refused:
            core.require_ready()
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        core.connector.failure = None
        await core.drain()
        with pytest.raises(CallRefused, match="is DRAINING"):
            core.require_ready()
    finally:
        await core.close()


async def test_requests_that_the_engine_does_not_have_yet_wait_too(model: Path) -> None:
    core = WorkerCore(config(model), "decode")
    await core.open()
    try:
        core.requests_ahead = 3
        assert core.status().requests_waiting == 3
    finally:
        await core.close()


async def test_a_connector_that_cannot_be_closed_does_not_keep_the_engine_running(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = WorkerCore(config(model), "decode")
    await core.open()
    close = core.connector.close

    async def fail() -> None:
        await close()
        raise RuntimeError("a transport cannot be closed")

    monkeypatch.setattr(core.connector, "close", fail)
    with pytest.raises(RuntimeError, match="cannot be closed"):
        await core.close()
    check_closed(core)


async def test_closing_a_worker_that_was_cancelled_while_opening_leaves_nothing(model: Path) -> None:
    core = WorkerCore(config(model), "prefill")
    opening = asyncio.create_task(core.open())
    while core.phase == "starting":
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await core.close()
    check_no_thread()
