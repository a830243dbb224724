"""What is wrong with a request as HTTP or as JSON: always the OpenAI error shape, never a traceback."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import DEADLINE_S, Service, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


MALFORMED = {
    "nothing": b"",
    "half an object": b'{"model": "tiny",',
    "not UTF-8": b'{"model": "\xff"}',
    "something after it": b'{"model": "tiny"} x',
    "NaN": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "Infinity": b'{"model": "tiny", "prompt": "x", "temperature": -Infinity}',
    "half a surrogate pair": rb'{"model": "tiny", "prompt": "\ud800"}',
    "half a surrogate pair as a key": rb'{"model": "tiny", "prompt": "x", "\udc00": 1}',
    "a list": b"[1]",
    "text": b'"hello"',
    "null": b"null",
    "too deep": b"[" * 100_000,
    "a number of 10,000 digits": b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_body_that_is_no_json_object(service: Service, path: str, body: bytes) -> None:
    response = await service.http.post(path, content=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


async def test_a_whole_surrogate_pair_is_text(service: Service) -> None:
    response = await service.http.post("/v1/completions", content=rb'{"model": "tiny", "prompt": "\ud83d\ude00"}')
    assert response.status_code == 200
    assert service.worker.requests[0].prompt_token_ids[1:] == service.ids("😀")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completion", "/v1/models/", "/v1/completions/", "/metrics/x"])
async def test_unknown_paths(service: Service, path: str) -> None:
    response = await service.http.get(path)
    assert response.status_code == 404
    assert path in error_of(response)["message"] or path == "/v1/models/"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/completions"), ("PUT", "/v1/chat/completions"), ("POST", "/v1/models"), ("DELETE", "/health")],
)
async def test_wrong_methods(service: Service, method: str, path: str) -> None:
    response = await service.http.request(method, path)
    assert response.status_code == 405
    assert method in error_of(response)["message"]
    assert response.headers["allow"]


async def test_a_declared_body_over_the_limit(folder: Path) -> None:
    async with running(folder, max_body_bytes=1000) as service:
        response = await service.complete(prompt="x" * 2000)
        assert response.status_code == 413
        assert error_of(response)["message"] == "the body is larger than 1000 bytes"
        assert (await service.complete()).status_code == 200


async def test_an_undeclared_body_over_the_limit(folder: Path) -> None:
    async def chunks() -> Any:
        for _ in range(50):
            yield b" " * 100

    async with running(folder, max_body_bytes=1000) as service:
        response = await service.http.post("/v1/completions", content=chunks())
        assert response.status_code == 413


async def test_a_body_that_does_not_come(folder: Path) -> None:
    async with running(folder, request_timeout_s=0.2) as service:
        url = httpx.URL(service.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            async with asyncio.timeout(DEADLINE_S):
                answer = await reader.read()  # to the end: the connection is closed
        finally:
            writer.close()
            await writer.wait_closed()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "timeout"


@pytest.mark.parametrize(
    ("sent", "returned"),
    [
        ("abc-1.2_3:4", "abc-1.2_3:4"),
        ('a b\tc;d="e"', "abcde"),
        ("x" * 300, "x" * 128),
    ],
)
async def test_request_ids_are_made_harmless(service: Service, sent: str, returned: str) -> None:
    for path in ("/health", "/nowhere"):
        response = await service.http.get(path, headers={"x-request-id": sent})
        assert response.headers["x-request-id"] == returned


@pytest.mark.parametrize("headers", [{}, {b"x-request-id": b""}, {b"x-request-id": "ä€".encode()}])
async def test_a_request_id_is_minted(service: Service, headers: dict[bytes, bytes]) -> None:
    ids = {(await service.http.get("/health", headers=headers)).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(len(one) > 10 for one in ids)


async def test_request_ids_travel_on_and_stay_unique(service: Service) -> None:
    headers = {"x-request-id": "mine"}
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for _ in range(2):
        assert (await service.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    first, second = (request.request_id for request in service.worker.requests)
    assert first.startswith("mine.")
    assert second.startswith("mine.")
    assert first != second


async def test_health(service: Service) -> None:
    response = await service.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
