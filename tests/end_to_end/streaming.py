"""Completions over HTTP, whole and as server-sent events, reduced to what the tests compare."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec


class Answer(msgspec.Struct, kw_only=True):
    """One choice: its text, its tokens (stop token included) and why it ended."""

    text: str
    token_ids: list[int]
    finish_reason: str


async def complete(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """One request, answered whole."""
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return Answer(text=choice["text"], token_ids=choice["token_ids"], finish_reason=choice["finish_reason"])


async def complete_streaming(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """One request, answered as a stream that ends with `[DONE]` and names its finish reason once."""
    text, done = "", False
    token_ids: list[int] = []
    reasons: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            assert not done, f"{line} after [DONE]"
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                done = True
                continue
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["text"]
                token_ids += choice.get("token_ids") or []
                if choice["finish_reason"] is not None:
                    reasons.append(choice["finish_reason"])
    assert done
    assert len(reasons) == 1, reasons
    return Answer(text=text, token_ids=token_ids, finish_reason=reasons[0])
