"""Runs an engine at a batch size and keeps what its steps took."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bench.errors import BenchError
from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor import StepTimes
from engine.model_info import ModelInfo
from engine.request import EngineRequest, Failed, Output, SamplingParams

ROUND_S = 600.0
"""A round that takes longer has hung."""


class Steps:
    """An engine that is fed requests of random tokens."""

    def __init__(self, engine: Engine, info: ModelInfo, seen: list[StepTimes], seed: int) -> None:
        self.engine = engine
        self._info = info
        self._seen = seen
        self._random = random.Random(seed)
        self._rounds = 0

    def round(self, batch: int, prompt: int, answer: int) -> list[StepTimes]:
        """Steps in which `batch` prompts of `prompt` tokens were computed and continued by `answer` tokens each.

        Raises:
            BenchError: a request failed, or the round did not end.
        """
        self._seen.clear()
        self._rounds += 1
        ended = threading.Semaphore(0)
        failures: list[str] = []

        def sink(output: Output) -> None:
            if isinstance(output, Failed):
                failures.append(output.message)
            elif output.finish is None:
                return
            ended.release()

        for index in range(batch):
            self.engine.submit(
                EngineRequest(
                    request_id=f"{self._rounds}.{index}",
                    prompt_token_ids=[self._random.randrange(self._info.vocab_size) for _ in range(prompt)],
                    sampling=SamplingParams(seed=index),
                    max_tokens=answer,
                    stop_token_ids=frozenset(),
                    sink=sink,
                )
            )
        for _ in range(batch):
            if not ended.acquire(timeout=ROUND_S):
                raise BenchError(f"a round of {batch} requests did not end within {ROUND_S:g} s")
        if failures:
            raise BenchError(f"{len(failures)} of {batch} requests failed: {failures[0]}")
        return list(self._seen)


@contextmanager
def open_steps(info: ModelInfo, config: EngineConfig, seed: int) -> Iterator[Steps]:
    """An engine for as long as it is measured."""
    seen: list[StepTimes] = []
    engine = Engine(info, config, on_step=seen.append)
    engine.start()
    try:
        yield Steps(engine, info, seen, seed)
    finally:
        engine.close()
