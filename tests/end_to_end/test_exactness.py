"""Greedy answers through the served path equal transformers' `generate`, token for token, in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import ClusterHandle
from tests.end_to_end.prompts import LENGTHS
from tests.end_to_end.reference import greedy, prompts_of_exact_length
from tests.end_to_end.streaming import complete, complete_streaming

MAX_TOKENS = 8
DEADLINE_S = 240.0

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def prompts(model: Path) -> list[list[int]]:
    """One prompt per length."""
    return prompts_of_exact_length(model)


@pytest.fixture(scope="session")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` answers."""
    return greedy(model, prompts, MAX_TOKENS)


def body(cluster: ClusterHandle, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }


async def ask_all(cluster: ClusterHandle, prompts: list[list[int]], *, at_once: int, stream: bool) -> list[list[int]]:
    gate = asyncio.Semaphore(at_once)
    ask = complete_streaming if stream else complete
    async with httpx.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S) as client:

        async def one(prompt: list[int]) -> list[int]:
            async with gate:
                return (await ask(client, body(cluster, prompt))).token_ids

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("at_once", [1, 16])
async def test_greedy_answers_equal_generate(
    cluster: ClusterHandle, prompts: list[list[int]], expected: list[list[int]], at_once: int, stream: bool
) -> None:
    answers = await ask_all(cluster, prompts, at_once=at_once, stream=stream)
    wrong = {
        length: (answer, want)
        for length, answer, want in zip(LENGTHS, answers, expected, strict=True)
        if answer != want
    }
    assert not wrong


async def test_decode_computes_no_prompt_token_and_its_pages_come_by_transfer(
    cluster: ClusterHandle, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Counted on the decode worker: one forward token per drawn token after the first, and the bytes of every block."""
    chosen = [index for index, answer in enumerate(expected) if len(answer) > 1]
    before = cluster.worker_status("decode")
    answers = await ask_all(cluster, [prompts[index] for index in chosen], at_once=4, stream=True)
    after = cluster.worker_status("decode")

    assert answers == [expected[index] for index in chosen]
    grown = {name: after.counters[name] - before.counters.get(name, 0) for name in after.counters}
    lengths = [len(prompts[index]) for index in chosen]
    blocks = sum(-(-length // cluster.block_size) for length in lengths)
    assert grown["tokens_imported"] == sum(lengths)
    assert grown["bytes_imported"] == blocks * cluster.block_bytes
    assert grown["tokens_computed"] == sum(len(answer) - 1 for answer in answers)
    assert grown.get("prompt_tokens_computed", 0) == 0


def test_the_transport_in_use_is_the_one_required(cluster: ClusterHandle, request: pytest.FixtureRequest) -> None:
    (worker,) = cluster.status()["pools"]["decode"]
    (peer,) = worker["peers"]
    assert peer["transport"] == request.node.callspec.params["cluster"].split()[0]
    assert peer["gb_per_s"] > 0
