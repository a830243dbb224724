"""Which worker a request goes to, and what becomes of workers that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.errors import DecodeWorkerError
from tests.gateway.conftest import DEADLINE_S, Service, running, until, until_ready
from tests.gateway.fake_decode import FakeDecodeWorker, Held, refuses, says


def numbers(service: Service) -> list[int]:
    return [len(worker.requests) for worker in service.workers]


async def test_requests_one_after_another_take_turns(folder: Path) -> None:
    async with running(folder, 3) as service:
        for _ in range(6):
            assert (await service.complete(max_tokens=1)).status_code == 200
        assert numbers(service) == [2, 2, 2]


async def test_requests_at_once_go_to_the_least_busy(folder: Path) -> None:
    async with running(folder, 2) as service:
        held = [Held(0), Held(0)]
        for worker, script in zip(service.workers, held, strict=True):
            worker.script = script
        asking = [asyncio.create_task(service.complete(max_tokens=1)) for _ in range(4)]
        await until(lambda: numbers(service) == [2, 2])
        held[1].release(2)
        await until(lambda: sum(task.done() for task in asking) == 2)
        asking += [asyncio.create_task(service.complete(max_tokens=1)) for _ in range(2)]
        await until(lambda: numbers(service) == [2, 4])
        held[0].release(2)
        held[1].release(2)
        assert {response.status_code for response in await asyncio.gather(*asking)} == {200}


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_one_worker_cannot_take_goes_to_another(folder: Path, code: grpc.StatusCode, stream: bool) -> None:
    async with running(folder, 2) as service:
        service.workers[0].script = refuses(code)
        service.workers[1].script = says(service.ids("x"))
        for _ in range(3):
            response = await service.complete(stream=stream)
            assert response.status_code == 200
            assert "error" not in response.text


async def test_when_no_worker_can_take_it_the_last_answer_counts(folder: Path) -> None:
    async with running(folder, 2) as service:
        for worker in service.workers:
            worker.script = refuses(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        response = await service.complete()
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["message"] == "full"
        assert numbers(service) == [1, 1]


async def test_what_is_wrong_with_a_request_is_asked_once_and_held_against_nobody(folder: Path) -> None:
    async with running(folder, 2) as service:
        for worker in service.workers:
            worker.script = refuses(grpc.StatusCode.INVALID_ARGUMENT, "too long")
        for _ in range(6):
            assert (await service.complete()).status_code == 400
        assert numbers(service) == [3, 3]
        assert (await service.http.get("/ready")).status_code == 200


async def test_nothing_is_tried_again_after_the_first_token(folder: Path) -> None:
    async with running(folder, 2) as service:
        for worker in service.workers:
            worker.script = refuses(grpc.StatusCode.UNAVAILABLE, after=(0,))
        response = await service.complete()
        assert response.status_code == 503
        assert sum(numbers(service)) == 1


async def test_a_worker_that_failed_is_avoided_until_a_probe_has_gone_through_it(folder: Path) -> None:
    async with running(folder, 2) as service:
        first = service.workers[0]
        first.script = refuses(grpc.StatusCode.UNAVAILABLE)
        first.probe_script = refuses(grpc.StatusCode.UNAVAILABLE)
        while not first.requests:
            assert (await service.complete(max_tokens=1)).status_code == 200
        count = len(first.requests)
        for _ in range(4):
            assert (await service.complete(max_tokens=1)).status_code == 200
        assert len(first.requests) == count

        first.script = first.probe_script = says([0])
        async with asyncio.timeout(DEADLINE_S):
            while len(first.requests) == count:
                assert (await service.complete(max_tokens=1)).status_code == 200
        assert len(first.probes) > 1


async def test_the_only_worker_is_asked_even_when_it_failed(folder: Path) -> None:
    async with running(folder) as service:
        service.worker.script = refuses(grpc.StatusCode.UNAVAILABLE)
        assert (await service.complete()).status_code == 503
        service.worker.script = says([0])
        assert (await service.complete()).status_code == 200
        assert (await service.http.get("/ready")).status_code == 200


async def test_a_worker_that_dies_and_comes_back(folder: Path) -> None:
    async with running(folder) as service:
        await service.worker.stop()
        for _ in range(3):
            response = await service.complete()
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "service_unavailable"
        ready = await service.http.get("/ready")
        assert ready.status_code == 503
        assert "decode-0" in ready.json()["reason"]
        await service.worker.start()
        async with asyncio.timeout(DEADLINE_S):
            await until_ready(service.http)
        assert (await service.complete()).status_code == 200


async def test_without_workers_requests_are_told_to_come_later(folder: Path) -> None:
    async with running(folder, ready=False) as service:
        response = await service.complete()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert (await service.complete(temperature=9)).status_code == 400


async def test_a_worker_takes_no_request_before_its_probe_has_succeeded(folder: Path) -> None:
    async with running(folder, 2, ready=False) as service:
        first, second = service.workers
        first.probe_script = held = Held(0)
        await service.gateway.set_decode_workers([await first.start(), await second.start()])
        async with asyncio.timeout(DEADLINE_S):
            await until_ready(service.http)
        for _ in range(4):
            assert (await service.complete(max_tokens=1)).status_code == 200
        assert numbers(service) == [0, 4]
        held.release(2)
        async with asyncio.timeout(DEADLINE_S):
            while not first.requests:
                assert (await service.complete(max_tokens=1)).status_code == 200


async def test_a_worker_that_leaves_the_pool_ends_what_it_has(folder: Path) -> None:
    async with running(folder, 2) as service:
        first, second = service.workers
        first.script = held = Held(0)
        second.script = says([0])
        asking = [asyncio.create_task(service.complete(max_tokens=1)) for _ in range(2)]
        await until(lambda: numbers(service) == [1, 1])
        third = FakeDecodeWorker("decode-2")
        try:
            addresses = [second.address, await third.start()]
            await service.gateway.set_decode_workers(addresses)
            held.release()
            assert [(await task).status_code for task in asking] == [200, 200]
            async with asyncio.timeout(DEADLINE_S):
                while not third.requests:
                    assert (await service.complete(max_tokens=1)).status_code == 200
            assert len(second.probes) == 1
            assert len(first.requests) == 1
        finally:
            await third.stop()


@pytest.mark.parametrize(("field", "value"), [("model", "another"), ("dtype", "bfloat16"), ("vocab_size", 500)])
async def test_workers_that_differ_are_refused_and_the_pool_stays(folder: Path, field: str, value: Any) -> None:
    async with running(folder) as service:
        other = FakeDecodeWorker("decode-9")
        setattr(other.description, field, value)
        try:
            addresses = [service.worker.address, await other.start()]
            with pytest.raises(DecodeWorkerError, match=f"differ in {field}"):
                await service.gateway.set_decode_workers(addresses)
        finally:
            await other.stop()
        assert (await service.complete()).status_code == 200


async def test_a_worker_of_another_role_is_refused(folder: Path) -> None:
    async with running(folder, ready=False) as service:
        other = FakeDecodeWorker("prefill-0", role="prefill")
        try:
            with pytest.raises(DecodeWorkerError, match="prefill-0 is a prefill worker"):
                await service.gateway.set_decode_workers([await other.start()])
        finally:
            await other.stop()


async def test_a_worker_that_does_not_answer_is_refused(folder: Path) -> None:
    async with running(folder, ready=False, describe_timeout_s=0.2) as service:
        address = await service.worker.start()
        await service.worker.stop()
        with pytest.raises(DecodeWorkerError, match="decode-0 does not answer"):
            await service.gateway.set_decode_workers([address])
        assert (await service.http.get("/ready")).json()["reason"] == "no decode worker is connected yet"


async def test_a_wrong_token_is_refused(folder: Path) -> None:
    async with running(folder, ready=False, token="another") as service:
        with pytest.raises(DecodeWorkerError, match="token"):
            await service.gateway.set_decode_workers([await service.worker.start()])
