"""Starting and stopping: ports, tokenizers, draining, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn

from gateway import Gateway, GatewayConfig, ListenError, TokenizerError
from tests.gateway.conftest import DEADLINE_S, running, until, until_ready
from tests.gateway.fake_decode import TOKEN, FakeDecodeWorker, Held, says


def config(folder: Path, port: int = 0, host: str = "127.0.0.1") -> GatewayConfig:
    return GatewayConfig(host=host, port=port, model_path=str(folder), token=TOKEN)


async def test_the_model_is_called_after_its_folder(folder: Path) -> None:
    async with running(folder, served_name="") as service:
        assert [model["id"] for model in (await service.http.get("/v1/models")).json()["data"]] == ["tiny-model"]
        assert (await service.complete(model="tiny-model")).status_code == 200
        assert (await service.complete(model="tiny")).status_code == 404


async def test_a_busy_port_is_refused_at_once_and_named(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ListenError, match=f"127.0.0.1, port {port}") as caught:
            await Gateway(config(folder, port)).start()
    assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)


async def test_a_host_that_is_not_ours_is_refused(folder: Path) -> None:
    with pytest.raises(ListenError, match=r"192\.0\.2\.1"):
        await Gateway(config(folder, host="192.0.2.1")).start()


async def test_a_folder_without_a_tokenizer_is_refused_and_the_port_is_free_again(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(TokenizerError, match="does not exist"):
        await Gateway(config(tmp_path / "nowhere", port)).start()
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


async def test_only_loopback_unless_told(folder: Path) -> None:
    gateway = Gateway(config(folder))
    url = await gateway.start()
    try:
        port = httpx.URL(url).port
        listening = {
            connection.laddr.ip
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }
        assert listening == {"127.0.0.1"}
    finally:
        await gateway.stop(0)


async def test_a_wildcard_is_listened_on_but_not_advertised(folder: Path) -> None:
    gateway = Gateway(config(folder, host="0.0.0.0"))
    url = await gateway.start()
    try:
        assert url.startswith("http://127.0.0.1:")
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{url}/health")).status_code == 200
    finally:
        await gateway.stop(0)


async def test_stopping_lets_answers_end(folder: Path) -> None:
    async with running(folder) as service:
        service.worker.script = held = Held(service.ids("x")[0])
        asking = [asyncio.create_task(service.complete(stream=stream, max_tokens=2)) for stream in (False, True)]
        await until(lambda: len(service.worker.requests) == 2)
        held.release(2)
        stopping = asyncio.create_task(service.gateway.stop(DEADLINE_S))
        await until(lambda: service.gateway._in_flight._draining)
        held.release(2)
        for response in await asyncio.gather(*asking):
            assert response.status_code == 200
            assert "error" not in response.text
        await stopping
        with pytest.raises(httpx.ConnectError):
            await service.http.get("/health")


async def test_stopping_takes_no_new_requests(folder: Path) -> None:
    async with running(folder) as service:
        service.worker.script = held = Held(0)
        url = httpx.URL(service.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        asking = asyncio.create_task(service.complete(max_tokens=1))
        await until(lambda: service.worker.requests)
        stopping = asyncio.create_task(service.gateway.stop(DEADLINE_S))
        await until(lambda: service.gateway._in_flight._draining)
        assert await reader.read() == b""  # a connection that idles is closed
        writer.close()
        held.release()
        assert (await asking).status_code == 200
        await stopping
        assert len(service.worker.requests) == 1


async def test_what_does_not_end_in_time_is_ended_with_an_error(folder: Path) -> None:
    async with running(folder) as service:
        service.worker.script = held = Held(service.ids("x")[0])
        held.release()
        asking = [asyncio.create_task(service.complete(stream=stream, max_tokens=9)) for stream in (True, False)]
        await until(lambda: len(service.worker.requests) == 2)
        await until(lambda: held._released.empty())
        await service.gateway.stop(0.05)
        stream, whole = await asyncio.gather(*asking)
        assert whole.status_code == 503
        assert whole.json()["error"]["message"] == "the gateway is stopping"
        if stream.status_code == 200:  # the only token may have been the other request's
            last = [line for line in stream.text.splitlines() if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the gateway is stopping"
        else:
            assert stream.status_code == 503
        async with asyncio.timeout(DEADLINE_S):
            await held.cancelled.wait()


async def test_a_client_that_takes_nothing_does_not_keep_it_from_stopping(folder: Path) -> None:
    async with running(folder, max_model_len=1 << 20) as service:
        service.worker.script = says([10])
        url = httpx.URL(service.url)
        _, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        try:
            body = json.dumps(
                {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 200_000, "return_token_ids": True}
            ).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            writer.write(head + body)
            await until(lambda: service.worker.requests)
            async with asyncio.timeout(DEADLINE_S):
                await service.gateway.stop(0.1)
        finally:
            writer.transport.abort()


async def test_stopping_twice_or_before_starting_is_harmless(folder: Path) -> None:
    gateway = Gateway(config(folder))
    await gateway.stop(0)
    gateway = Gateway(config(folder))
    await gateway.start()
    await gateway.stop(0)
    await gateway.stop(0)


async def test_a_server_that_fails_is_known_to_the_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = asyncio.Event()

    async def main_loop(server: uvicorn.Server) -> None:
        await broken.wait()
        raise RuntimeError("out of descriptors")

    monkeypatch.setattr(uvicorn.Server, "main_loop", main_loop)
    gateway = Gateway(config(folder))
    await gateway.start()
    assert gateway.failure is None
    broken.set()
    await until(lambda: gateway.failure is not None)
    assert "out of descriptors" in str(gateway.failure)
    await gateway.stop(0)


async def test_stopping_while_a_probe_hangs(folder: Path) -> None:
    async with running(folder, ready=False) as service:
        service.worker.probe_script = held = Held(0)
        await service.gateway.set_decode_workers([await service.worker.start()])
        async with asyncio.timeout(DEADLINE_S):
            await held.called.wait()
            await service.gateway.stop(0)
            await held.cancelled.wait()


async def test_nothing_is_left_behind(folder: Path) -> None:
    async def one() -> None:
        async with running(folder) as service:
            assert (await service.complete(stream=True)).status_code == 200
            service.worker.script = Held(0)
            asking = asyncio.create_task(service.complete())
            await until(lambda: len(service.worker.requests) == 2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    await one()
    fds = psutil.Process().num_fds()
    for _ in range(3):
        await one()
    # gRPC closes its own sockets a moment later.
    await until(lambda: psutil.Process().num_fds() <= fds)
    await until(lambda: len(asyncio.all_tasks()) <= 1 or not _ours())
    assert not _ours()


def _ours() -> list[asyncio.Task[object]]:
    current = asyncio.current_task()
    return [task for task in asyncio.all_tasks() if task is not current and "gateway" in repr(task.get_coro())]


async def test_it_runs_on_another_thread_and_leaves_signals_alone(folder: Path) -> None:
    """Ray runs actors' coroutines on a thread of its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    statuses: list[int] = []

    async def serve() -> None:
        worker = FakeDecodeWorker()
        gateway = Gateway(config(folder))
        url = await gateway.start()
        try:
            await gateway.set_decode_workers([await worker.start()])
            async with httpx.AsyncClient(base_url=url) as http:
                async with asyncio.timeout(DEADLINE_S):
                    await until_ready(http)
                response = await http.post("/v1/completions", json={"model": "tiny-model", "prompt": "x"})
                statuses.append(response.status_code)
        finally:
            await gateway.stop(1)
            await worker.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    await asyncio.to_thread(thread.join, DEADLINE_S)
    assert statuses == [200]
    assert {number: signal.getsignal(number) for number in handlers} == handlers
