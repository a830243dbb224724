"""A decode worker and a prefill worker as real processes: exact answers, and nothing left behind whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from connector import HandshakeError, IncompatibleError
from tests.decode.pool import DEADLINE_S, ENGINE, Pool, PrefillProcess, is_idle, prompts, status_of, until_idle
from tests.tiny_model import greedy, save_tiny_model

SHM = {"transport": "shm"}
pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def open_descriptors() -> Counter[str]:
    """How many of each kind, after what hangs in reference cycles has gone."""
    gc.collect()
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]] += 1
    return found


def own_threads() -> list[str]:
    """The engine's and the transports' threads; an event loop's helpers come and go as it likes."""
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    names += [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("engine", "shm-", "ucx-"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=[(transport, mode) for transport in ("shm", "ucx") for mode in ("read", "write")], ids="-".join)
def connector(request: pytest.FixtureRequest) -> dict[str, Any]:
    transport, mode = request.param
    return {"transport": transport, "mode": mode}


@pytest.fixture
async def pair(model: Path, connector: dict[str, Any]) -> AsyncIterator[tuple[Pool, PrefillProcess]]:
    prefill = PrefillProcess(model, connector)
    pool = Pool(model, connector)
    try:
        await pool.start()
        (link,) = await pool.worker.set_prefill_workers([await prefill.started()])
        assert (link.transport, link.name) == (connector["transport"], "prefill-0")
        assert link.gb_per_s > 0
        yield pool, prefill
    finally:
        await pool.stop()
        prefill.kill()


async def test_answers_equal_generate_and_nothing_is_left(
    pair: tuple[Pool, PrefillProcess], model: Path, connector: dict[str, Any]
) -> None:
    pool, prefill = pair
    asked = prompts(16)
    answers = await asyncio.gather(*(pool.generate(prompt, 12) for prompt in asked))
    for prompt, (tokens, stats) in zip(asked, answers, strict=True):
        assert tokens == await asyncio.to_thread(greedy, model, prompt, 12)
        assert stats.prompt_tokens == len(prompt)
        assert stats.prompt_tokens_computed == 0
        if len(tokens) > 1:
            assert stats.prompt_tokens_imported == len(prompt)
            assert stats.transport == connector["transport"]
            assert stats.imported_bytes == -(-len(prompt) // 4) * 4 * 3 * 2 * 2 * 16 * 4
    await until_idle(pool.status, lambda: status_of(prefill.address))
    assert (await pool.status()).counters["prompt_tokens_computed"] == 0


async def test_an_answer_of_one_token_moves_no_page(pair: tuple[Pool, PrefillProcess], model: Path) -> None:
    pool, prefill = pair
    (prompt,) = prompts(1)
    tokens, stats = await pool.generate(prompt, 1)
    assert tokens == await asyncio.to_thread(greedy, model, prompt, 1)
    assert stats.imported_bytes == 0
    await until_idle(pool.status, lambda: status_of(prefill.address))
    counters = (await pool.status()).counters
    assert counters["requests_without_transfer"] == 1
    assert counters["bytes_imported"] == 0


async def test_drawn_tokens_do_not_depend_on_who_draws(pair: tuple[Pool, PrefillProcess]) -> None:
    """The first is drawn by prefill, the others by decode: one seeded stream, in any company."""
    pool, _ = pair
    prompt = prompts(9)[8]
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 12345, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    alone, _ = await pool.generate(prompt, 20, sampling=sampling)
    together = await asyncio.gather(*(pool.generate(prompt, 20, sampling=sampling) for _ in range(6)))
    assert [tokens for tokens, _ in together] == [alone] * 6
    other, _ = await pool.generate(prompt, 20, sampling=sampling | {"seed": 54321})
    assert other != alone


async def test_clients_that_leave_leave_nothing(pair: tuple[Pool, PrefillProcess]) -> None:
    pool, prefill = pair
    rng = random.Random(7)
    asked = prompts(60)

    async def leave(index: int) -> None:
        """After some tokens, or at whatever moment the task is cancelled."""
        task = asyncio.create_task(pool.generate(asked[index], 100, leave_after=rng.randrange(1, 60)))
        for _ in range(rng.randrange(400)):
            await asyncio.sleep(0)
        if index % 2:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(leave(index) for index in range(len(asked))))
    await until_idle(pool.status, lambda: status_of(prefill.address))


async def test_requests_end_when_prefill_dies(pair: tuple[Pool, PrefillProcess]) -> None:
    pool, prefill = pair
    asked = [prompt for prompt in prompts(48) if len(prompt) > 20]
    first, _ = await pool.generate(asked[0], 2)
    assert first
    tasks = [asyncio.create_task(pool.generate(prompt, 8)) for prompt in asked]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    prefill.kill()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(error, grpc.aio.AioRpcError) for error in failed), failed
    assert {error.code() for error in failed if isinstance(error, grpc.aio.AioRpcError)} <= {
        grpc.StatusCode.UNAVAILABLE
    }
    await until_idle(pool.status)


async def test_a_prefill_worker_that_comes_back_is_a_new_peer(
    pair: tuple[Pool, PrefillProcess], model: Path, connector: dict[str, Any]
) -> None:
    pool, prefill = pair
    prefill.kill()
    again = PrefillProcess(model, connector)
    try:
        address = await again.started()
        assert address.incarnation != prefill.address.incarnation
        await pool.worker.set_prefill_workers([address])
        (prompt,) = prompts(1)
        tokens, _ = await pool.generate(prompt, 5)
        assert tokens == await asyncio.to_thread(greedy, model, prompt, 5)
    finally:
        again.kill()


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"engine": ENGINE | {"dtype": "bfloat16"}}, "dtype"), ({"connector": SHM | {"mode": "write"}}, "mode")],
)
async def test_a_prefill_worker_with_other_settings_is_refused(
    model: Path, changed: dict[str, Any], field: str
) -> None:
    prefill = PrefillProcess(model, **{"connector": SHM} | changed)
    pool = Pool(model, SHM)
    try:
        await pool.start()
        with pytest.raises(IncompatibleError, match=field):
            await pool.worker.set_prefill_workers([await prefill.started()])
    finally:
        await pool.stop()
        prefill.kill()


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_a_prefill_worker_with_another_block_size_is_understood(model: Path, mode: str) -> None:
    prefill = PrefillProcess(model, SHM | {"mode": mode}, engine=ENGINE | {"block_size": 6})
    pool = Pool(model, SHM | {"mode": mode})
    try:
        await pool.start()
        await pool.worker.set_prefill_workers([await prefill.started()])
        asked = prompts(8)
        answers = await asyncio.gather(*(pool.generate(prompt, 6) for prompt in asked))
        for prompt, (tokens, _) in zip(asked, answers, strict=True):
            assert tokens == await asyncio.to_thread(greedy, model, prompt, 6)
        await until_idle(pool.status, lambda: status_of(prefill.address))
    finally:
        await pool.stop()
        prefill.kill()


async def test_a_prefill_worker_of_another_cluster_is_refused(model: Path) -> None:
    prefill = PrefillProcess(model, SHM, token="another secret")
    pool = Pool(model, SHM)
    try:
        await pool.start()
        with pytest.raises(HandshakeError):
            await pool.worker.set_prefill_workers([await prefill.started()])
    finally:
        await pool.stop()
        prefill.kill()


async def test_without_a_prefill_worker_a_request_is_refused_at_once(model: Path) -> None:
    pool = Pool(model, SHM)
    try:
        await pool.start()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pool.generate([5], 3)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as too_long:
            await pool.generate([5] * 500, 20)
        assert too_long.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "500" in str(too_long.value.details())
        assert is_idle(await pool.status())
    finally:
        await pool.stop()


async def test_stopping_gives_everything_back(model: Path, connector: dict[str, Any]) -> None:
    async def once() -> None:
        prefill = PrefillProcess(model, connector)
        pool = Pool(model, connector)
        try:
            await pool.start()
            await pool.worker.set_prefill_workers([await prefill.started()])
            await pool.generate([5, 6, 7], 3)
        finally:
            await pool.stop()
            assert await prefill.stop() == 0
            prefill.kill()

    await once()  # what is made once per process exists from here on
    fds = open_descriptors()
    assert own_threads() == []
    await once()
    async with asyncio.timeout(DEADLINE_S):  # gRPC closes its sockets when it gets to it
        while open_descriptors() - fds:
            await asyncio.sleep(0.02)
    assert own_threads() == []
