"""The engine as its callers see it: preemption, aborts, refusals, failures, many threads, closing."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

import engine.executor as module
from engine import (
    BlockTable,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineError,
    Failed,
    Output,
    RequestTooLong,
    SamplingParams,
)
from engine.runner import forward
from tests.engine.driver import PATIENCE_S, Heard, request, running, submit
from tests.engine.tiny import VOCABULARY, Tiny, prompt_of


def test_preemption_changes_nothing(llama: Tiny) -> None:
    prompts = [prompt_of(9 + number, number) for number in range(5)]
    hot = SamplingParams(temperature=1.2, seed=77, repetition_penalty=1.2)
    with running(llama, num_blocks=200) as roomy:
        drawn = [submit(roomy, str(n), prompt, 20, sampling=hot).tokens() for n, prompt in enumerate(prompts)]
        assert roomy.stats().preemptions == 0
    with running(llama, num_blocks=16, max_num_batched_tokens=16) as tight:
        greedy = [submit(tight, f"greedy {n}", prompt, 20) for n, prompt in enumerate(prompts)]
        seeded = [submit(tight, f"seeded {n}", prompt, 20, sampling=hot) for n, prompt in enumerate(prompts)]
        assert [one.tokens() for one in greedy] == [llama.greedy(prompt, 20) for prompt in prompts]
        assert [one.tokens() for one in seeded] == drawn
        assert tight.stats().preemptions > 0


def test_stop_tokens_end_a_request_and_are_told(llama: Tiny) -> None:
    prompt = prompt_of(6, 1)
    expected = llama.greedy(prompt, 10)
    stop = expected[4]
    with running(llama) as engine:
        heard = submit(engine, "stopping", prompt, 10, stop_token_ids=frozenset({stop, 198}))
        assert heard.tokens() == expected[: expected.index(stop) + 1]
        assert heard.outputs[-1].finish == "stop"  # type: ignore[union-attr]


def test_logprobs_are_those_of_the_raw_logits(llama: Tiny) -> None:
    prompt = prompt_of(6, 1)
    with running(llama) as engine:
        heard = submit(engine, "one", prompt, 3, sampling=SamplingParams(temperature=2.0, seed=4, top_k=20))
        tokens = heard.tokens()
    for place, output in enumerate(heard.outputs):
        expected = torch.log_softmax(llama.logits([*prompt, *tokens[:place]]), dim=-1)[tokens[place]]
        assert output.logprob == pytest.approx(float(expected), abs=1e-4)  # type: ignore[union-attr]


def test_retained_blocks_are_the_callers(llama: Tiny) -> None:
    with running(llama, num_blocks=8) as engine:
        heard = Heard()
        asked = request("kept", prompt_of(9, 1), 1, heard, retain=True)
        engine.submit(asked)
        heard.tokens()
        assert asked.table is not None
        assert len(asked.table.block_ids) == 3
        assert engine.stats().blocks_free == 5
        engine.free(asked.table)
        engine.free(asked.table)
        assert engine.stats().blocks_free == 8


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompt": []}, EngineError),
        ({"max_tokens": 0}, EngineError),
        ({"max_tokens": 1, "output_token_ids": [3]}, EngineError),
        ({"prompt": [1] * 250, "max_tokens": 7}, RequestTooLong),
        ({"max_tokens": 1000}, RequestTooLong),
        ({"prompt": [1, VOCABULARY]}, EngineError),
        ({"prompt": [1, -1]}, EngineError),
        ({"max_tokens": 5, "output_token_ids": [VOCABULARY]}, EngineError),
        ({"computed_tokens": 1}, EngineError),
    ],
)
def test_what_cannot_be_done_is_refused(llama: Tiny, changes: dict[str, Any], error: type[EngineError]) -> None:
    with running(llama) as engine:
        with pytest.raises(error):
            submit(engine, "bad", **{"prompt": [1, 2], "max_tokens": 2, **changes})
        assert submit(engine, "good", [1, 2], 2).tokens() == llama.greedy([1, 2], 2)


def test_a_refused_request_gives_its_blocks_back_to_who_waits_for_them(llama: Tiny) -> None:
    with running(llama, num_blocks=4) as engine:
        table = engine.reserve("moved", 16)
        assert table is not None
        waiting = submit(engine, "waiting", [1, 2, 3], 2)
        with pytest.raises(EngineError, match="claims 17 computed tokens"):
            submit(engine, "bad", [1] * 14, 2, table=table, computed_tokens=17)
        assert table.freed
        assert waiting.tokens() == llama.greedy([1, 2, 3], 2)


def test_a_reservation_is_told_when_the_one_before_it_gives_up(llama: Tiny) -> None:
    with running(llama, num_blocks=4) as engine:
        held = engine.reserve("held", 8)
        assert held is not None
        told = threading.Event()
        engine.on_blocks_freed(told.set)
        submit(engine, "waiting", [1] * 12, 2)
        assert engine.reserve("pages", 4) is None
        assert not told.is_set()
        engine.abort("waiting")
        assert told.wait(PATIENCE_S)  # though no block has come back
        table = engine.reserve("pages", 4)
        assert table is not None
        engine.free(table)
        engine.free(held)


def test_an_id_is_used_once_at_a_time(llama: Tiny) -> None:
    with running(llama) as engine:
        first = submit(engine, "same", [1, 2], 200)
        with pytest.raises(EngineError, match="in flight already"):
            submit(engine, "same", [1, 2], 2)
        engine.abort("same")
        assert submit(engine, "same", [1, 2], 2).tokens() == llama.greedy([1, 2], 2)
        assert all(not isinstance(output, Failed) for output in first.outputs)


def test_closed_engines_refuse(llama: Tiny) -> None:
    with running(llama) as engine:
        pass
    table = BlockTable("nobody")
    with pytest.raises(EngineClosed):
        submit(engine, "late", [1], 1, table=table)
    assert table.freed
    engine.abort("late")
    engine.close()


@pytest.mark.parametrize("started", [True, False])
def test_closing_fails_what_is_in_flight(llama: Tiny, started: bool) -> None:
    engine = Engine(llama.info, EngineConfig(dtype="float32", kv_cache_bytes=1 << 20))
    if started:
        engine.start()
    heard = [submit(engine, str(number), [1, 2, 3], 250) for number in range(3)]
    if started:
        heard[0].wait_for(1)
    engine.close(PATIENCE_S)
    for one in heard:
        assert isinstance(one.end(), Failed)
    assert engine.stats().blocks_free == engine.num_blocks


def test_a_failing_step_fails_its_requests_only(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = threading.Event()

    def fail_when_broken(model: Any, batch: Any) -> torch.Tensor:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("out of something")
        return forward(model, batch)

    monkeypatch.setattr(module, "forward", fail_when_broken)
    with running(llama) as engine:
        victims = [submit(engine, f"victim {number}", prompt_of(5, number), 200) for number in range(3)]
        for victim in victims:
            victim.wait_for(1)
        broken.set()
        for victim in victims:
            assert victim.end() == Failed(message="a step of the model failed: out of something")
        assert submit(engine, "next", [1, 2], 4).tokens() == llama.greedy([1, 2], 4)


def test_logits_that_are_not_finite_fail_the_request(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "forward", lambda model, batch: torch.full((len(batch.logits_rows), VOCABULARY), torch.nan)
    )
    with running(llama) as engine:
        assert "not finite" in submit(engine, "bad", [1, 2], 4).end().message  # type: ignore[union-attr]


def test_a_sink_that_raises_harms_nobody_else(llama: Tiny) -> None:
    def sink(output: Output) -> None:
        raise ValueError("not today")

    with running(llama) as engine:
        engine.submit(request("careless", [1, 2, 3], 5, sink))
        assert submit(engine, "other", [1, 2], 8).tokens() == llama.greedy([1, 2], 8)


def test_an_engine_that_dies_says_so(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with running(llama) as engine:

        def die() -> None:
            raise AssertionError("the books do not add up")

        monkeypatch.setattr(engine._scheduler, "schedule", die)
        outcome = submit(engine, "last", [1, 2], 4).end()
        assert "the books do not add up" in outcome.message  # type: ignore[union-attr]
        with pytest.raises(EngineClosed, match="the books do not add up"):
            submit(engine, "later", [1, 2], 4)


def test_nothing_is_heard_after_abort_returned(llama: Tiny) -> None:
    chance = random.Random(3)
    with running(llama, num_blocks=40, max_num_batched_tokens=8) as engine:
        for round_number in range(40):
            heard = [submit(engine, f"{round_number} {n}", prompt_of(11, n), 60) for n in range(4)]
            heard[chance.randrange(4)].wait_for(1 + chance.randrange(8))
            counts = []
            for n, one in enumerate(heard):
                engine.abort(f"{round_number} {n}")
                counts.append(len(one.outputs))
            last = submit(engine, "last", [1, 2], 2)
            last.tokens()
            assert [len(one.outputs) for one in heard] == counts
            assert engine.stats().blocks_free == 40


def test_a_sink_may_abort_and_submit(llama: Tiny) -> None:
    with running(llama) as engine:
        again, other = Heard(), Heard()

        def sink(output: Output) -> None:
            engine.abort("self")
            engine.abort("other")
            engine.submit(request("self", [1, 2], 3, again))

        with engine._changed:
            engine.submit(request("self", [3, 4], 50, sink))
            engine.submit(request("other", [5, 6], 50, other))
        assert again.tokens() == llama.greedy([1, 2], 3)
        assert other.outputs == []


def test_many_threads_submit_and_abort(llama: Tiny) -> None:
    prompts = [prompt_of(3 + number, number) for number in range(6)]
    expected = [llama.greedy(prompt, 8) for prompt in prompts]
    wrong: list[str] = []

    def work(thread: int) -> None:
        for turn in range(6):
            number = (thread + turn) % len(prompts)
            name = f"{thread} {turn}"
            heard = submit(engine, name, prompts[number], 8)
            if turn % 3 == 2:
                heard.wait_for(1)
                engine.abort(name)
            elif heard.tokens() != expected[number]:
                wrong.append(name)

    with running(llama, num_blocks=30, max_num_batched_tokens=12, max_num_seqs=5) as engine:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_step_that_does_not_end_keeps_its_memory(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def stuck(model: Any, batch: Any) -> torch.Tensor:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return forward(model, batch)

    monkeypatch.setattr(module, "forward", stuck)
    with running(llama, num_blocks=8) as engine:
        heard = submit(engine, "slow", [1, 2, 3], 5)
        assert entered.wait(PATIENCE_S)
        engine.abort("slow")
        assert engine.stats().blocks_free == 7  # the step may still write it
        with pytest.raises(EngineError, match=r"did not end within 0.001 s"):
            engine.close(0.001)
        assert engine.memory.fd >= 0
        with pytest.raises(EngineClosed, match="it is closing"):
            submit(engine, "late", [1], 1)
        go_on.set()
        engine.close(PATIENCE_S)
        assert engine.memory.fd == -1
        assert heard.outputs == []


def test_bfloat16_stays_close_to_float32(llama: Tiny) -> None:
    prompt = prompt_of(12, 5)
    engine = Engine(llama.info, EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_num_batched_tokens=5))
    engine.start()
    try:
        heard = submit(engine, "one", prompt, 8)
        tokens = heard.tokens()
    finally:
        engine.close(PATIENCE_S)
    for place, output in enumerate(heard.outputs):
        expected = torch.log_softmax(llama.logits([*prompt, *tokens[:place]]), dim=-1)[tokens[place]]
        assert output.logprob == pytest.approx(float(expected), abs=0.5)  # type: ignore[union-attr]
