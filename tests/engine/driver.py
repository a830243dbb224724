"""An engine that a test drives, and a request that remembers what it was told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine import Engine, EngineConfig, EngineRequest, Failed, Output, SamplingParams, Token
from tests.engine.tiny import Tiny

PATIENCE_S = 60.0
"""How long a test waits for anything at all; nothing is asserted about time."""

GREEDY = SamplingParams(temperature=0.0)


class Heard:
    """A request's sink."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self._ended = threading.Event()
        self._grown = threading.Condition()

    def __call__(self, output: Output) -> None:
        """Take one output."""
        with self._grown:
            self.outputs.append(output)
            self._grown.notify_all()
        if isinstance(output, Failed) or output.finish is not None:
            self._ended.set()

    def wait_for(self, count: int) -> None:
        """Until `count` outputs have come."""
        with self._grown:
            assert self._grown.wait_for(lambda: len(self.outputs) >= count, PATIENCE_S)

    def end(self) -> Output:
        """Wait for the last output."""
        assert self._ended.wait(PATIENCE_S), "the request has not ended"
        return self.outputs[-1]

    def tokens(self) -> list[int]:
        """Wait for the end, and expect tokens only."""
        self.end()
        assert all(isinstance(output, Token) for output in self.outputs), self.outputs
        return [output.token_id for output in self.outputs if isinstance(output, Token)]


def request(name: str, prompt: list[int], max_tokens: int, sink: Any, **rest: Any) -> EngineRequest:
    """A greedy request, if nothing else is said."""
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sink=sink,
        **{"sampling": GREEDY, "stop_token_ids": frozenset(), **rest},
    )


def submit(engine: Engine, name: str, prompt: list[int], max_tokens: int, **rest: Any) -> Heard:
    """Submit a request and listen to it."""
    heard = Heard()
    engine.submit(request(name, prompt, max_tokens, heard, **rest))
    return heard


def poison(engine: Engine) -> None:
    """Fill every page with NaN: whatever is read without having been written shows."""
    for pages in engine._pool.pages.values():
        pages.fill_(torch.nan)


def bytes_per_token(tiny: Tiny) -> int:
    """Of float32 pages of attention, all layers."""
    rows = [layer.attention for layer in tiny.info.layers if layer.attention is not None]
    return 4 * sum(row.num_kv_heads * (row.key_dim + row.value_dim) for row in rows)


@contextmanager
def running(
    tiny: Tiny, *, num_blocks: int = 64, block_size: int = 4, prefix_cache: bool = False, **config: Any
) -> Iterator[Engine]:
    """A started float32 engine whose pages are NaN; at the end all blocks are free and the pool is sound."""
    settings = EngineConfig(
        dtype="float32",
        block_size=block_size,
        **{
            "kv_cache_bytes": num_blocks * block_size * bytes_per_token(tiny),
            "prefix_cache": prefix_cache,
            **config,
        },
    )
    engine = Engine(tiny.info, settings)
    poison(engine)
    engine.start()
    try:
        yield engine
    finally:
        engine.close(PATIENCE_S)
    engine._blocks.validate()
    assert engine.stats().blocks_free == engine.num_blocks
