"""A gateway on a real socket in this process, over scripted decode workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.config import GatewayConfig
from gateway.gateway import Gateway
from gateway.tokenizer import Tokenizer, load_tokenizer
from tests.gateway.fake_decode import TOKEN, FakeDecodeWorker, says
from tests.gateway.folders import byte_level, save_folder

DEADLINE_S = 60.0


class Service:
    """What a test sees: the gateway, its decode workers, its tokenizer, and an HTTP client."""

    def __init__(self, gateway: Gateway, url: str, workers: list[FakeDecodeWorker], tokenizer: Tokenizer) -> None:
        self.gateway = gateway
        self.url = url
        self.workers = workers
        self.tokenizer = tokenizer
        self.http = httpx.AsyncClient(base_url=url, timeout=DEADLINE_S)

    @property
    def worker(self) -> FakeDecodeWorker:
        """The only worker."""
        (worker,) = self.workers
        return worker

    def ids(self, text: str) -> list[int]:
        """The tokens of `text`, no special ones added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions; model and prompt need not be said."""
        return await self.http.post("/v1/completions", json={"model": "tiny", "prompt": "Hello", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        """POST /v1/chat/completions; model and messages need not be said."""
        messages = [{"role": "user", "content": "Hello"}]
        return await self.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **body})

    async def metric(self, name: str) -> float:
        """The value of one line of /metrics, given with its labels."""
        for line in (await self.http.get("/metrics")).text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no {name} in the metrics")


async def until(condition: Callable[[], Any]) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def until_ready(http: httpx.AsyncClient) -> None:
    """Wait for /ready to be green."""
    async with asyncio.timeout(DEADLINE_S):
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    folder: Path, num_workers: int = 1, *, ready: bool = True, max_model_len: int = 256, **config: Any
) -> AsyncIterator[Service]:
    """A gateway over `num_workers` fake workers, ready unless it is not to be; everything ends with the block."""
    async with AsyncExitStack() as stack:
        tokenizer = load_tokenizer(folder)
        workers = []
        for index in range(num_workers):
            worker = FakeDecodeWorker(f"decode-{index}", max_model_len)
            stack.push_async_callback(worker.stop)
            workers.append(worker)
        gateway = Gateway(
            GatewayConfig(**{"port": 0, "model_path": str(folder), "served_name": "tiny", "token": TOKEN, **config})
        )
        url = await gateway.start()
        stack.push_async_callback(gateway.stop, 0.0)
        service = Service(gateway, url, workers, tokenizer)
        stack.push_async_callback(service.http.aclose)
        if ready:
            await gateway.set_decode_workers([await worker.start() for worker in workers])
            await until_ready(service.http)
        yield service


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a byte-level tokenizer and a chat template."""
    return save_folder(tmp_path_factory.mktemp("models") / "tiny-model", byte_level())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_service(folder: Path) -> AsyncIterator[Service]:
    """A ready gateway over one worker, for a module of tests whose loop is the module's."""
    async with running(folder) as service:
        yield service


@pytest.fixture
def service(shared_service: Service) -> Service:
    """The module's gateway, its worker as if new."""
    shared_service.worker.script = says([0])
    shared_service.worker.requests.clear()
    return shared_service
