"""A worker's parts: all of them open, or none stays open."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector import ConnectorConfig, ListenerError
from engine import EngineConfig, EngineError, ModelError
from rpc.errors import BindError
from tests.tiny_model import VOCAB_SIZE, save_tiny_model
from worker import WorkerConfig, WorkerCore

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


async def test_closing_a_worker_that_was_cancelled_while_opening_leaves_nothing(model: Path) -> None:
    core = WorkerCore(config(model), "prefill")
    opening = asyncio.create_task(core.open())
    while core.phase == "starting":
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await core.close()
    check_no_thread()
