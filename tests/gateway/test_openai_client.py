"""The official client, over a real socket: what it returns, and which of its errors it raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio

from tests.gateway.conftest import Service
from tests.gateway.fake_decode import refuses, says

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(loop_scope="module")
async def client(service: Service) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_completion(service: Service, client: Any) -> None:
    service.worker.script = says(service.ids(" over the river"))
    prompt = "The ferry"
    answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=3, temperature=0)
    expected = service.ids(" over the river")[:3]
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.choices[0].text == service.tokenizer.vocabulary.decode(expected)
    assert answer.choices[0].finish_reason == "length"
    num_prompt = len(service.tokenizer.encode(prompt, add_special_tokens=True))
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == num_prompt + 3


async def test_completion_stream(service: Service, client: Any) -> None:
    ids = service.ids("Größe 😀 数")
    service.worker.script = says(ids)
    stream = await client.completions.create(model="tiny", prompt="x", max_tokens=len(ids), stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Größe 😀 数"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)


async def test_chat(service: Service, client: Any) -> None:
    service.worker.script = says([*service.ids("Hi there"), *service.ids("<|end|>")])
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hi there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(service.ids("Hi there")) + 1
    assert service.worker.requests[0].prompt_token_ids == service.ids("<|user|>Hello<|end|><|assistant|>")


async def test_chat_stream_with_usage(service: Service, client: Any) -> None:
    service.worker.script = says([*service.ids("Hi 😀"), *service.ids("<|end|>")])
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hi 😀"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(service.ids("Hi 😀")) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_synchronous_client(service: Service) -> None:
    service.worker.script = says([*service.ids("Hi"), *service.ids("<|end|>")])

    def ask() -> tuple[str, str, list[str]]:
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return str(whole.choices[0].message.content), streamed, [model.id for model in client.models.list()]

    assert await asyncio.to_thread(ask) == ("Hi", "Hi", ["tiny"])


async def test_models(client: Any) -> None:
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("another/one")
    assert caught.value.code == "model_not_found"


async def test_the_request_id_comes_back(client: Any) -> None:
    answer = await client.completions.with_raw_response.create(
        model="tiny", prompt="x", extra_headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.parse()._request_id == "mine-1"


async def test_a_wrong_parameter_is_a_bad_request_that_names_it(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    assert "temperature must be a number from 0 to 2, got 3" in caught.value.message


async def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert "gpt-9" in caught.value.message


ERRORS: list[tuple[grpc.StatusCode, type[openai.APIStatusError], int]] = [
    (grpc.StatusCode.INVALID_ARGUMENT, openai.BadRequestError, 400),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, openai.RateLimitError, 429),
    (grpc.StatusCode.UNAVAILABLE, openai.InternalServerError, 503),
    (grpc.StatusCode.CANCELLED, openai.InternalServerError, 503),
    (grpc.StatusCode.DEADLINE_EXCEEDED, openai.InternalServerError, 504),
    (grpc.StatusCode.INTERNAL, openai.InternalServerError, 500),
    (grpc.StatusCode.UNAUTHENTICATED, openai.InternalServerError, 500),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("code", "kind", "status"), ERRORS, ids=[code.name for code, _, _ in ERRORS])
async def test_a_leg_that_fails_before_the_first_token_has_a_status_of_its_own(
    service: Service, client: Any, code: grpc.StatusCode, kind: type[openai.APIStatusError], status: int, stream: bool
) -> None:
    service.worker.script = refuses(code, "no luck")
    with pytest.raises(kind) as caught:
        await client.completions.create(model="tiny", prompt="x", stream=stream)
    assert caught.value.status_code == status
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL])
async def test_a_leg_that_fails_after_the_first_token_is_an_error_in_the_stream(
    service: Service, client: Any, code: grpc.StatusCode
) -> None:
    service.worker.script = refuses(code, after=tuple(service.ids("Hi")))
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    text = ""

    async def read() -> None:
        nonlocal text
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""

    with pytest.raises(openai.APIError) as caught:
        await read()
    assert text == "Hi"
    assert not isinstance(caught.value, openai.APIConnectionError)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.completions.create(model="tiny", prompt="x"),
        lambda client: client.chat.completions.create(model="tiny", messages=MESSAGES),
    ],
    ids=["completions", "chat"],
)
async def test_a_leg_that_fails_halfway_is_never_half_an_answer(
    service: Service, client: Any, ask: Callable[[Any], Any]
) -> None:
    service.worker.script = refuses(grpc.StatusCode.INTERNAL, after=tuple(service.ids("Hi")))
    with pytest.raises(openai.InternalServerError):
        await ask(client)
