from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.conftest import Service, running
from tests.gateway.fake_decode import Held, refuses, says


async def samples(service: Service) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = await service.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def value(service: Service, name: str, **labels: Any) -> float:
    return (await samples(service))[name, tuple(sorted(labels.items()))]


async def test_requests_are_counted_by_endpoint_and_status(folder: Path) -> None:
    async with running(folder) as service:
        await service.complete(max_tokens=2)
        await service.complete(stream=True, max_tokens=2)
        await service.complete(temperature=9)
        await service.complete(model="another")
        await service.chat(max_tokens=1)
        service.worker.script = refuses(grpc.StatusCode.RESOURCE_EXHAUSTED)
        await service.complete()
        seen = await samples(service)
        counted = {
            (dict(labels)["endpoint"], dict(labels)["status"]): number
            for (name, labels), number in seen.items()
            if name == "kvferry_http_requests_total"
        }
        assert counted == {
            ("/v1/completions", "200"): 2,
            ("/v1/completions", "400"): 1,
            ("/v1/completions", "404"): 1,
            ("/v1/completions", "429"): 1,
            ("/v1/chat/completions", "200"): 1,
        }


async def test_tokens_and_times(folder: Path) -> None:
    async with running(folder) as service:
        service.worker.script = says(service.ids("x"))
        await service.complete(prompt=[1] * 10, max_tokens=4)
        await service.complete(prompt=[1] * 5, max_tokens=1, stream=True)
        seen = await samples(service)
        assert seen["kvferry_prompt_tokens_total", ()] == 15
        assert seen["kvferry_output_tokens_total", ()] == 5
        assert seen["kvferry_time_to_first_token_seconds_count", ()] == 2
        assert seen["kvferry_time_per_output_token_seconds_count", ()] == 1
        assert seen["kvferry_request_duration_seconds_count", ()] == 2
        assert seen["kvferry_http_requests_in_flight", ()] == 0


async def test_requests_in_flight(folder: Path) -> None:
    async with running(folder) as service:
        service.worker.script = held = Held(0)
        asking = asyncio.create_task(service.complete(max_tokens=1))
        await held.called.wait()
        assert await value(service, "kvferry_http_requests_in_flight") == 1
        held.release()
        await asking


async def test_workers_say_how_they_are_when_asked(folder: Path) -> None:
    async with running(folder, 2) as service:
        first = service.workers[0]
        first.status.sources_held = 3
        first.status.imports_active = 2
        first.status.requests_running = 5
        first.status.counters["tokens_imported"] = 77
        seen = await samples(service)
        label = (("worker", "decode-0"),)
        assert seen["kvferry_worker_up", label] == 1
        assert seen["kvferry_worker_blocks_total", label] == 64
        assert seen["kvferry_worker_blocks_free", label] == 60
        assert seen["kvferry_worker_sources_held", label] == 3
        assert seen["kvferry_worker_imports_active", label] == 2
        assert seen["kvferry_worker_requests_running", label] == 5
        assert seen["kvferry_worker_requests_waiting", label] == 0
        assert seen["kvferry_worker_events_total", (("counter", "tokens_imported"), *label)] == 77
        first.status.blocks_free = 10
        assert await value(service, "kvferry_worker_blocks_free", worker="decode-0") == 10
        assert await value(service, "kvferry_worker_blocks_free", worker="decode-1") == 60


@pytest.mark.parametrize("silent", [False, True])
async def test_a_worker_that_does_not_answer_is_down_and_hides_nothing_else(folder: Path, silent: bool) -> None:
    async with running(folder, 2, scrape_timeout_s=0.2) as service:
        if silent:
            service.workers[0].may_tell_status.clear()
        else:
            await service.workers[0].stop()
        seen = await samples(service)
        assert seen["kvferry_worker_up", (("worker", "decode-0"),)] == 0
        assert seen["kvferry_worker_up", (("worker", "decode-1"),)] == 1
        assert ("kvferry_worker_blocks_free", (("worker", "decode-0"),)) not in seen
        assert ("kvferry_worker_blocks_free", (("worker", "decode-1"),)) in seen
        assert ("kvferry_http_requests_in_flight", ()) in seen


async def test_two_gateways_in_one_process_count_apart(folder: Path) -> None:
    async with running(folder) as one, running(folder) as other:
        await one.complete(max_tokens=1)
        assert await value(one, "kvferry_output_tokens_total") == 1
        assert await value(other, "kvferry_output_tokens_total") == 0
