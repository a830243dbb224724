"""What a stream is made of, event by event, and when each event comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.gateway.conftest import DEADLINE_S, Service, running
from tests.gateway.fake_decode import LENGTH, STOP, Chunks, Held, chunk, refuses, says

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


class Stream:
    """The events of one answer as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def line(self) -> str:
        """The next line that is not empty; "" at the end."""
        async with asyncio.timeout(DEADLINE_S):
            async for line in self._lines:
                if line:
                    return line
        return ""

    async def event(self) -> Any:
        """The next event's value."""
        line = await self.line()
        assert line.startswith("data: "), line
        return json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def streaming(service: Service, path: str = "/v1/completions", **body: Any) -> AsyncIterator[Stream]:
    request = {"model": "tiny", "stream": True, **ENDPOINTS[path], **body}
    async with service.http.stream("POST", path, json=request) as response:
        yield Stream(response)


async def all_lines(service: Service, path: str = "/v1/completions", **body: Any) -> list[str]:
    async with streaming(service, path, **body) as stream:
        assert stream.response.status_code == 200
        assert stream.response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return [line async for line in stream.response.aiter_lines() if line]


def events_in(lines: list[str]) -> list[Any]:
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_chat_stream_event_by_event(service: Service) -> None:
    service.worker.script = says([*service.ids("Hi"), *service.ids("<|end|>")])
    ids = service.ids("Hi")
    events = events_in(await all_lines(service, "/v1/chat/completions"))
    choices = [event["choices"][0] for event in events]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    texts = [choice["delta"]["content"] for choice in choices[1:-1]]
    assert texts == [service.tokenizer.vocabulary.decode([token_id]) for token_id in ids]
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert events[0]["id"].startswith("chatcmpl-")
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {event["model"] for event in events} == {"tiny"}
    assert all("usage" not in event for event in events)


async def test_a_completion_stream_event_by_event(service: Service) -> None:
    service.worker.script = says(service.ids("xyz"))
    events = events_in(await all_lines(service, max_tokens=2))
    choices = [event["choices"][0] for event in events]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        *((service.tokenizer.vocabulary.decode([token_id]), None) for token_id in service.ids("xyz")[:2]),
        ("", "length"),
    ]
    assert {event["object"] for event in events} == {"text_completion"}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_usage_comes_once_at_the_end_when_asked_for(service: Service, path: str) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}, "max_tokens": 3}
    events = events_in(await all_lines(service, path, **options))
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    num_prompt = len(service.worker.requests[0].prompt_token_ids)
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, 3)
    assert usage["total_tokens"] == num_prompt + 3


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_token_ids_come_when_asked_for_and_none_is_lost(service: Service, path: str) -> None:
    ids = [*service.ids("a😀 STOP"), *service.ids("<|end|>")]
    service.worker.script = says(ids)
    options: dict[str, Any] = {"return_token_ids": True, "max_tokens": len(ids), "stop": ["STOPPED"]}
    events = events_in(await all_lines(service, path, **options))
    assert [token_id for event in events for token_id in event["choices"][0]["token_ids"]] == ids
    assert events[0]["prompt_token_ids"] == list(service.worker.requests[0].prompt_token_ids)
    assert all("prompt_token_ids" not in event for event in events[1:])

    request = {"model": "tiny", **ENDPOINTS[path], **options}
    whole = (await service.http.post(path, json=request)).json()
    assert whole["choices"][0]["token_ids"] == ids
    assert whole["prompt_token_ids"] == events[0]["prompt_token_ids"]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_token_ids_do_not_come_unasked(service: Service, path: str) -> None:
    for event in events_in(await all_lines(service, path, max_tokens=2)):
        assert "prompt_token_ids" not in event
        assert "token_ids" not in event["choices"][0]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_the_first_token_is_sent_before_there_is_a_second(service: Service, path: str) -> None:
    service.worker.script = held = Held(service.ids("x")[0])
    held.release()
    async with streaming(service, path, max_tokens=2) as stream:
        first = await stream.event()
        if "chat" in path:
            assert first["choices"][0]["delta"]["role"] == "assistant"
            first = await stream.event()
        choice = first["choices"][0]
        assert (choice.get("text") or choice["delta"]["content"]) == "x"
        held.release()
        while "[DONE]" not in (line := await stream.line()):
            assert line


async def test_a_first_token_whose_text_is_held_back_is_a_sign_of_life(service: Service) -> None:
    half = service.ids("数")[:1]
    assert service.tokenizer.vocabulary.decode(half) == "\ufffd"
    service.worker.script = held = Held(half[0])
    held.release()
    async with streaming(service, max_tokens=2) as stream:
        assert (await stream.event())["choices"][0]["text"] == ""


async def test_the_status_waits_for_the_first_token(service: Service) -> None:
    service.worker.script = held = Held(0)
    request = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 1}
    asking = asyncio.create_task(service.http.post("/v1/completions", json=request))
    await held.called.wait()
    assert not asking.done()
    held.release()
    assert (await asking).status_code == 200


async def test_long_silences_are_broken_by_comments(folder: Path) -> None:
    async with running(folder, status_wait_s=30.0, keepalive_s=0.02) as service:
        service.worker.script = held = Held(service.ids("x")[0])
        held.release()
        async with streaming(service, max_tokens=2) as stream:
            assert (await stream.event())["choices"][0]["text"] == "x"
            assert await stream.line() == ": keep-alive"
            assert await stream.line() == ": keep-alive"
            held.release()
            while "[DONE]" not in (line := await stream.line()):
                assert line


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_very_long_prefill_keeps_the_stream_alive(folder: Path, path: str) -> None:
    async with running(folder, status_wait_s=0.02, keepalive_s=0.02) as service:
        service.worker.script = held = Held(service.ids("x")[0])
        async with streaming(service, path, max_tokens=1) as stream:
            if "chat" in path:
                assert (await stream.event())["choices"][0]["delta"]["role"] == "assistant"
            assert await stream.line() == ": keep-alive"
            held.release()
            lines = []
            while (line := await stream.line()) != "data: [DONE]":
                lines.append(line)
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line != ": keep-alive"]
            assert [event["choices"][0]["finish_reason"] for event in events] == [None, "length"]


async def test_an_error_after_the_first_token_ends_the_stream(service: Service) -> None:
    service.worker.script = refuses(grpc.StatusCode.UNAVAILABLE, "prefill is gone", after=tuple(service.ids("x")))
    lines = await all_lines(service)
    assert "[DONE]" not in lines[-1]
    assert json.loads(lines[-1].removeprefix("data: ")) == {
        "error": {
            "message": "prefill is gone",
            "type": "server_error",
            "param": None,
            "code": "service_unavailable",
        }
    }
    assert all("error" not in line for line in lines[:-1])


async def test_an_answer_that_ends_without_a_reason_is_an_error(service: Service) -> None:
    async def script(request: Any) -> Chunks:
        yield chunk(*service.ids("x"))

    service.worker.script = script
    assert json.loads((await all_lines(service))[-1].removeprefix("data: "))["error"]["code"] == "incomplete_answer"
    response = await service.complete()
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "incomplete_answer"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_answer_and_the_call(service: Service, stream: bool) -> None:
    ids = [service.ids(letter)[0] for letter in "one STOP"]
    service.worker.script = held = HeldSequence(ids)
    body: dict[str, Any] = {"stop": ["STOP", "never"], "max_tokens": 100}
    if stream:
        events = events_in(await all_lines(service, **body))
        text = "".join(event["choices"][0]["text"] for event in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        answer = (await service.complete(**body)).json()
        (choice,) = answer["choices"]
        text, reason = choice["text"], choice["finish_reason"]
        assert answer["usage"]["completion_tokens"] == len("one STOP")
    assert (text, reason) == ("one ", "stop")
    async with asyncio.timeout(DEADLINE_S):
        await held.cancelled.wait()


async def test_a_stop_string_in_the_middle_of_one_message(service: Service) -> None:
    ids = [service.ids(letter)[0] for letter in "abcdef"]

    async def script(request: Any) -> Chunks:
        yield chunk(*ids, finish=LENGTH)

    service.worker.script = script
    answer = (await service.complete(stop="cd", return_token_ids=True)).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["token_ids"] == ids[:4]


@pytest.mark.parametrize("tail", ["<", "<|", "<|e"])
async def test_an_answer_that_ends_in_half_a_stop_string_keeps_it(service: Service, tail: str) -> None:
    ids = [service.ids(letter)[0] for letter in f"x{tail}"]
    service.worker.script = says(ids)
    events = events_in(await all_lines(service, stop="<|eot", max_tokens=len(ids)))
    assert "".join(event["choices"][0]["text"] for event in events) == f"x{tail}"
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"][0]["finish_reason"]] == [
        "length"
    ]


async def test_half_a_character_at_the_end_is_released_as_decoding_has_it(service: Service) -> None:
    ids = service.ids("a数")[:-1]
    service.worker.script = says(ids)
    expected = service.tokenizer.vocabulary.decode(ids)
    assert expected.endswith("\ufffd")
    assert (await service.complete(max_tokens=len(ids))).json()["choices"][0]["text"] == expected


async def test_a_stop_token_has_no_text_but_is_counted(service: Service) -> None:
    ids = [*service.ids("Hi"), service.ids("e")[0]]
    service.worker.script = says(ids)
    answer = (await service.complete(stop_token_ids=[ids[-1]], return_token_ids=True)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "stop")
    assert choice["token_ids"] == ids
    assert answer["usage"]["completion_tokens"] == len(ids)


async def test_a_stop_token_as_the_first_token(service: Service) -> None:
    async def script(request: Any) -> Chunks:
        yield chunk(*service.ids("<|end|>"), finish=STOP)

    service.worker.script = script
    answer = (await service.chat()).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = events_in(await all_lines(service, "/v1/chat/completions"))
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]


async def test_many_streams_at_once_do_not_mix(service: Service) -> None:
    alphabet = [service.ids(letter)[0] for letter in "abcdefghijklmnop"]

    async def script(request: Any) -> Chunks:
        own = request.prompt_token_ids[0]
        for drawn in range(1, request.max_tokens + 1):
            await asyncio.sleep(0)
            yield chunk(own, finish=LENGTH if drawn == request.max_tokens else 0)

    service.worker.script = script

    async def one(token_id: int) -> str:
        events = events_in(await all_lines(service, prompt=[token_id], max_tokens=20))
        return "".join(event["choices"][0]["text"] for event in events)

    texts = await asyncio.gather(*(one(token_id) for token_id in alphabet))
    assert texts == [letter * 20 for letter in "abcdefghijklmnop"]


class HeldSequence:
    """Draws given tokens, then waits for ever: somebody has to cancel it."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self.cancelled = asyncio.Event()

    async def __call__(self, request: Any) -> Chunks:
        try:
            for token_id in self._token_ids:
                yield chunk(token_id)
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
