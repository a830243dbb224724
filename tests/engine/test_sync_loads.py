"""Requests whose pages arrive in the step that begins with them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import pytest

from engine import BlockTable, Engine, Failed
from engine.blocks import BlockGroup
from engine.errors import LoadFailed
from tests.engine.driver import Heard, request, running, submit
from tests.engine.tiny import Tiny, prompt_of


class CopyingLoad:
    """Pages of another engine, copied layer by layer when they are waited for, as late as can be."""

    def __init__(self, source: Engine, sources: BlockTable, here: Engine, table: BlockTable, fails_at: int) -> None:
        self.request_id = "moved"
        whole = len(prompt_of(18, 1)) // 4
        self.covered: Mapping[str, frozenset[int]] = {"full": frozenset(table.block_ids[:whole])}
        self._source, self._sources, self._here, self._table = source, sources, here, table
        self._fails_at = fails_at
        self.layers: list[int] = []

    def start(self) -> None:
        pass

    def wait_for_states(self) -> None:
        pass

    def wait_for_layer(self, layer: int) -> None:
        if layer == self._fails_at:
            raise LoadFailed("the peer is gone")
        self.layers.append(layer)
        pages = self._here.geometry.groups[0].layers[layer]
        for there, here in zip(self._sources.block_ids, self._table.block_ids, strict=True):
            ctypes.memmove(
                self._here.memory.address + pages.offset + here * pages.block_stride,
                self._source.memory.address + pages.offset + there * pages.block_stride,
                pages.page_bytes,
            )

    def wait_for_all(self) -> None:
        if self.layers != [0, 1]:
            raise LoadFailed("not everything was waited for")


def prefilled(engine: Engine, prompt: list[int]) -> tuple[int, BlockTable]:
    heard = Heard()
    asked = request("prefill", prompt, 1, heard, retain=True)
    engine.submit(asked)
    (first,) = heard.tokens()
    assert asked.table is not None
    return first, asked.table


def move(source: Engine, here: Engine, prompt: list[int], fails_at: int = -1, **rest: Any) -> tuple[int, Heard]:
    first, sources = prefilled(source, prompt)
    heard = submit(
        here,
        "moved",
        prompt,
        8,
        output_token_ids=[first],
        computed_tokens=len(prompt),
        load=lambda table: CopyingLoad(source, sources, here, table, fails_at),
        **rest,
    )
    heard.end()
    source.free(sources)
    return first, heard


def always_zeroing(engine: Engine) -> None:
    """As if the pool had caches of two precisions."""
    groups: list[BlockGroup] = list(engine._blocks.groups.values())
    for group in groups:
        group.records = True


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
@pytest.mark.parametrize("zeroing", [False, True])
def test_an_answer_goes_on_from_pages_that_land_layer_by_layer(llama: Tiny, zeroing: bool, layout: str) -> None:
    prompt = prompt_of(18, 1)
    with running(llama, layout=layout) as source, running(llama, layout=layout) as here:
        if zeroing:
            always_zeroing(here)
        other = submit(here, "other", prompt_of(7, 2), 30)
        other.wait_for(2)
        first, heard = move(source, here, prompt)
        assert [first, *heard.tokens()] == llama.greedy(prompt, 8)
        assert here.stats().prompt_tokens_computed == 7
        assert other.tokens() == llama.greedy(prompt_of(7, 2), 30)


@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_what_does_not_arrive_is_computed_here(
    llama: Tiny, fails_at: int, prefix_cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(18, 1)
    with running(llama) as source, running(llama, prefix_cache=prefix_cache) as here:
        always_zeroing(here)
        other = submit(here, "other", prompt_of(7, 2), 30)
        other.wait_for(2)
        first, heard = move(source, here, prompt, fails_at)
        assert [first, *heard.tokens()] == llama.greedy(prompt, 8)
        assert here.stats().prompt_tokens_computed == 7 + 18
        assert other.tokens() == llama.greedy(prompt_of(7, 2), 30)
        assert "request moved is computed here: the peer is gone" in caplog.text


def test_or_the_request_fails_and_nobody_else(llama: Tiny) -> None:
    prompt = prompt_of(18, 1)
    with running(llama) as source, running(llama, prefix_cache=True) as here:
        other = submit(here, "other", prompt_of(7, 2), 30)
        other.wait_for(2)
        _, heard = move(source, here, prompt, 1, on_load_failure="fail")
        assert heard.outputs == [Failed(message="its pages could not be loaded: the peer is gone")]
        assert other.tokens() == llama.greedy(prompt_of(7, 2), 30)
        again = submit(here, "again", prompt, 2)
        assert again.tokens() == llama.greedy(prompt, 2)
        assert again.outputs[0].cached_tokens == 0  # type: ignore[union-attr]


def test_loaded_pages_are_shared_once_they_have_arrived(llama: Tiny) -> None:
    prompt = prompt_of(18, 1)
    with running(llama) as source, running(llama, prefix_cache=True) as here:
        move(source, here, prompt)
        again = submit(here, "again", prompt, 4)
        assert again.tokens() == llama.greedy(prompt, 4)
        assert again.outputs[0].cached_tokens == 17  # type: ignore[union-attr]
