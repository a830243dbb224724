"""Prompts in, texts out: the same tokens as transformers' `generate`, in the order asked; refusals, interrupts."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import (
    LLM,
    EngineClosed,
    EngineError,
    EngineRequest,
    GenerationFailed,
    ModelError,
    Output,
    PromptRefused,
    RequestTooLong,
    SamplingParams,
)
from engine.sampler import sample
from tests.engine.driver import GREEDY, PATIENCE_S
from tests.engine.tiny import VOCABULARY, Tiny, make_tiny, prompt_of
from tests.tiny_model import greedy, save_tiny_model

SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "kv_cache_bytes": 1 << 20}


@pytest.fixture(scope="module")
def llm(llama: Tiny) -> Iterator[LLM]:
    """Over a folder without a usable tokenizer."""
    with LLM(llama.path, **SETTINGS) as one:
        yield one
        assert one.engine.stats().blocks_free == one.engine.num_blocks


def test_greedy_answers_equal_generate_in_the_order_of_prompts(llm: LLM, llama: Tiny) -> None:
    prompts = [prompt_of(length, salt) for salt, length in enumerate((40, 1, 23, 7, 16))]
    counts = [3, 20, 9, 1, 12]  # they end in another order
    generations = llm.generate(prompts, GREEDY, max_tokens=counts)
    assert [one.token_ids for one in generations] == [
        llama.greedy(prompt, count) for prompt, count in zip(prompts, counts, strict=True)
    ]
    assert [one.prompt_token_ids for one in generations] == prompts
    assert [len(one.logprobs) for one in generations] == counts
    assert {one.finish for one in generations} == {"length"}
    assert {one.text for one in generations} == {None}


def test_a_single_prompt_is_a_list_of_one_and_sixteen_tokens_are_the_default(llm: LLM, llama: Tiny) -> None:
    prompt = prompt_of(5, 1)
    (generation,) = llm.generate(prompt, GREEDY)
    assert generation.token_ids == llama.greedy(prompt, 16)
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_params(llm: LLM, llama: Tiny) -> None:
    prompt = prompt_of(9, 2)
    hot = [SamplingParams(temperature=1.5, seed=seed) for seed in (1, 2, 1)]
    first, second, third, plain = llm.generate([prompt] * 4, [*hot, GREEDY])
    assert first.token_ids == third.token_ids != second.token_ids
    assert plain.token_ids == llama.greedy(prompt, 16)


def test_texts_are_tokenised_and_answered_in_text_up_to_the_end_token(tmp_path: Path) -> None:
    folder, prompt = save_tiny_model(tmp_path), [5, 40]
    whole = greedy(folder, prompt, 60)
    end = whole[20]
    expected = whole[: whole.index(end) + 1]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    with LLM(folder, **SETTINGS) as llm:
        text = " ".join(f"t{token}" for token in prompt)
        ended, more = (llm.generate(text, GREEDY, max_tokens=60, ignore_eos=on)[0] for on in (False, True))
    assert ended.prompt_token_ids == prompt
    assert ended.token_ids == expected
    assert ended.finish == "stop"
    assert ended.text == " ".join(f"t{token}" for token in expected)
    assert more.token_ids == whole
    assert more.finish == "length"


def test_further_stop_tokens(llm: LLM, llama: Tiny) -> None:
    prompt = prompt_of(6, 1)
    expected = llama.greedy(prompt, 10)
    (generation,) = llm.generate(prompt, GREEDY, max_tokens=10, stop_token_ids=[expected[3]], ignore_eos=True)
    assert generation.token_ids == expected[: expected.index(expected[3]) + 1]
    assert generation.finish == "stop"


def test_the_end_token_of_the_configuration(tmp_path: Path, llama: Tiny) -> None:
    prompt = prompt_of(6, 1)
    expected = llama.greedy(prompt, 10)
    make_tiny(tmp_path, eos_token_id=expected[5])
    with LLM(tmp_path, **SETTINGS) as llm:
        (generation,) = llm.generate(prompt, GREEDY, max_tokens=10)
    assert generation.token_ids == expected[: expected.index(expected[5]) + 1]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (prompt_of(250, 1), "250 prompt tokens and 16 output tokens do not fit: at most 256"),
        ([], "0 prompt tokens"),
        ([1, VOCABULARY], f"tokens from 1 to {VOCABULARY}; the model's are 0 to {VOCABULARY - 1}"),
    ],
)
def test_an_impossible_prompt_is_refused_before_anything_runs(llm: LLM, prompt: list[int], message: str) -> None:
    steps = llm.engine.stats().steps
    with pytest.raises(PromptRefused, match=r"prompt 1 of 3 \(counted from 0\) is refused: .*" + message) as refused:
        llm.generate([[1, 2], prompt, [3]], GREEDY)
    assert refused.value.index == 1
    assert isinstance(refused.value.__cause__, RequestTooLong if len(prompt) > 200 else EngineError)
    assert llm.engine.stats().steps == steps


def test_texts_need_a_tokenizer(llm: LLM, llama: Tiny) -> None:
    with pytest.raises(ModelError, match="has no usable tokenizer; give token ids instead of text"):
        llm.generate("hello", GREEDY)


def test_as_many_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(EngineError, match="there are 2 prompts and 3 params; give one for all, or one for each"):
        llm.generate([[1], [2]], [GREEDY] * 3)
    with pytest.raises(EngineError, match="there are 1 prompts and 2 max_tokens"):
        llm.generate([1, 2], GREEDY, max_tokens=[4, 4])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dtpye": "float32"}, "dtpye"), ({"dtype": "float8"}, "float8"), ({"block_size": 0}, "block_size is 0")],
)
def test_settings_that_cannot_be(llama: Tiny, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        LLM(llama.path, **settings)


def test_some_prompts_that_fail_do_not_take_the_others_along(
    llm: LLM, llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = sample
    monkeypatch.setattr(
        "engine.executor.sample",
        lambda logits, rows: [
            None if row.sequence.tokens[:2] == [9, 9] and row.position == 5 else one
            for row, one in zip(rows, drawn(logits, rows), strict=True)
        ],
    )
    with pytest.raises(GenerationFailed, match=r"1 of 2 prompts .* prompt 1 .*: .*not finite") as failed:
        llm.generate([prompt_of(5, 1), [9, 9, 9]], GREEDY)
    good, bad = failed.value.generations
    assert good.token_ids == llama.greedy(prompt_of(5, 1), 16)
    assert bad.token_ids == llama.greedy([9, 9, 9], 2)
    assert (good.finish, bad.finish) == ("length", None)
    assert set(failed.value.failures) == {1}


def test_an_interrupt_aborts_what_is_in_flight(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    delivered = threading.Event()

    def interrupted(*_: object) -> None:
        delivered.set()
        raise KeyboardInterrupt

    with LLM(llama.path, **SETTINGS) as llm:
        submit = llm.engine.submit

        def submit_and_interrupt(request: EngineRequest) -> None:
            sink = request.sink

            def interrupt(output: Output) -> None:
                sink(output)
                if not delivered.is_set():
                    main = threading.main_thread().ident
                    assert main is not None
                    signal.pthread_kill(main, signal.SIGINT)
                    assert delivered.wait(PATIENCE_S)

            request.sink = interrupt
            submit(request)

        monkeypatch.setattr(llm.engine, "submit", submit_and_interrupt)
        before = signal.signal(signal.SIGINT, interrupted)
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.generate([prompt_of(5, salt) for salt in range(3)], GREEDY, max_tokens=200)
        finally:
            signal.signal(signal.SIGINT, before)
        (after,) = llm.generate([1, 2, 3], GREEDY)  # a step, in which the aborted ones are forgotten
        assert after.token_ids == llama.greedy([1, 2, 3], 16)
        stats = llm.engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, llm.engine.num_blocks)


def test_closing_twice_is_harmless_and_then_nothing_is_taken(llama: Tiny) -> None:
    llm = LLM(llama.path, **SETTINGS)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate([1, 2], GREEDY)


def test_a_bar_is_shown_when_asked_for_and_never_in_pipes(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1, 2], [3]], GREEDY)
    assert capfd.readouterr().err == ""
    llm.generate([[1, 2], [3]], GREEDY, progress=True)
    assert "2 of 2 prompts" in capfd.readouterr().err


def test_the_package_offers_it_without_importing_torch() -> None:
    code = "import sys, engine; assert 'torch' not in sys.modules; assert engine.LLM and 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_may_be_given_as_text(llama: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama.path, folder)
    with LLM(str(folder), **SETTINGS) as llm:
        assert llm.generate([4, 5], GREEDY, max_tokens=2)[0].token_ids == llama.greedy([4, 5], 2)
