"""`/ready` is green when a real generation has gone through, and only then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from tests.gateway.conftest import DEADLINE_S, Service, running, until, until_ready
from tests.gateway.fake_decode import STOP, Chunks, Held, chunk, refuses, says


async def reason(service: Service) -> str:
    response = await service.http.get("/ready")
    assert response.status_code == 503
    body = response.json()
    assert body["status"] == "not ready"
    return str(body["reason"])


async def test_without_workers(folder: Path) -> None:
    async with running(folder, ready=False) as service:
        assert await reason(service) == "no decode worker is connected yet"
        assert (await service.http.get("/health")).status_code == 200


async def test_green_after_two_tokens_and_not_before(folder: Path) -> None:
    async with running(folder, ready=False) as service:
        service.worker.probe_script = held = Held(0)
        await service.gateway.set_decode_workers([await service.worker.start()])
        async with asyncio.timeout(DEADLINE_S):
            await held.called.wait()
        assert await reason(service) == "decode-0: a first generation is on its way"
        held.release()
        assert (await service.http.get("/ready")).status_code == 503
        held.release()
        async with asyncio.timeout(DEADLINE_S):
            await until_ready(service.http)
        (probe,) = service.worker.probes
        assert probe.max_tokens == 2
        assert len(probe.prompt_token_ids) > 1
        assert not probe.stop_token_ids


async def test_a_failed_probe_is_the_reason_and_is_repeated(folder: Path) -> None:
    async with running(folder, ready=False) as service:
        service.worker.probe_script = refuses(grpc.StatusCode.UNAVAILABLE, "no prefill worker")
        await service.gateway.set_decode_workers([await service.worker.start()])
        await until(lambda: service.gateway._router.workers[0].failures)
        assert await reason(service) == "decode-0: no prefill worker"
        assert (await service.complete()).status_code == 503
        service.worker.probe_script = says([0])
        async with asyncio.timeout(DEADLINE_S):
            await until_ready(service.http)
        assert (await service.complete()).status_code == 200


async def test_one_token_is_not_enough(folder: Path) -> None:
    async def one_token(request: object) -> Chunks:
        yield chunk(0, finish=STOP)

    async with running(folder, ready=False) as service:
        service.worker.probe_script = one_token
        await service.gateway.set_decode_workers([await service.worker.start()])
        await until(lambda: service.gateway._router.workers[0].last_failure)
        assert "a probe of 2 tokens came back with 1" in await reason(service)


async def test_a_worker_that_cancels_the_probe_is_probed_again(folder: Path) -> None:
    async with running(folder, ready=False) as service:
        service.worker.probe_script = refuses(grpc.StatusCode.CANCELLED)
        await service.gateway.set_decode_workers([await service.worker.start()])
        await until(lambda: len(service.worker.probes) > 1)
        service.worker.probe_script = says([0])
        async with asyncio.timeout(DEADLINE_S):
            await until_ready(service.http)


async def test_a_probe_that_hangs_has_a_deadline(folder: Path) -> None:
    async with running(folder, ready=False, probe_timeout_s=0.2) as service:
        service.worker.probe_script = held = Held(0)
        await service.gateway.set_decode_workers([await service.worker.start()])
        async with asyncio.timeout(DEADLINE_S):
            await held.cancelled.wait()
        await until(lambda: service.gateway._router.workers[0].last_failure)
        assert "took too long" in await reason(service)


async def test_one_proven_worker_is_enough(folder: Path) -> None:
    async with running(folder, 2, ready=False) as service:
        service.workers[0].probe_script = refuses(grpc.StatusCode.UNAVAILABLE)
        await service.gateway.set_decode_workers([await worker.start() for worker in service.workers])
        async with asyncio.timeout(DEADLINE_S):
            await until_ready(service.http)
        assert (await service.complete()).status_code == 200
        assert not service.workers[0].requests


async def test_one_failure_does_not_turn_it_off(folder: Path) -> None:
    async with running(folder) as service:
        service.worker.script = refuses(grpc.StatusCode.UNAVAILABLE)
        assert (await service.complete()).status_code == 503
        assert (await service.http.get("/ready")).status_code == 200


async def test_failure_after_failure_turns_it_off_until_a_probe_succeeds(folder: Path) -> None:
    async with running(folder) as service:
        service.worker.script = service.worker.probe_script = refuses(grpc.StatusCode.INTERNAL, "every transfer fails")
        for _ in range(3):
            assert (await service.complete()).status_code == 500
        assert "every transfer fails" in await reason(service)
        assert (await service.http.get("/health")).status_code == 200
        service.worker.probe_script = says([0])
        async with asyncio.timeout(DEADLINE_S):
            await until_ready(service.http)
