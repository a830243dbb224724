"""Synchronous loads: what zeroing leaves out for them, what waits for what, and what a failure spoils."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from connector.coverage import covered_blocks
from connector.pages import LAYOUTS, PoolGeometry
from engine.copies import BlockCopier
from engine.errors import LoadFailed
from engine.loads import LoadBarriers, LoadMode, exclude_loaded, sync_load_block_ids
from engine.page_work import BlockCopy, PageWork
from engine.preparation import prepare
from engine.zeroing.zeroer import Zeroer
from tests.engine.page_bytes import bytes_of, filled, geometry_of

LANDED = 99


class ScriptedLoad:
    """Says what it is asked for; fails where it is told to."""

    def __init__(
        self,
        request_id: str = "r",
        covered: Mapping[str, frozenset[int]] | None = None,
        fails_at: str = "",
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.request_id = request_id
        self.covered: Mapping[str, frozenset[int]] = covered or {}
        self.asked: list[str] = []
        self._fails_at = fails_at
        self._begin = begin

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if what == self._fails_at:
            raise LoadFailed(f"nothing came at {what}")

    def start(self) -> None:
        self._note("start")
        self._begin()

    def wait_for_states(self) -> None:
        self._note("states")

    def wait_for_layer(self, layer: int) -> None:
        self._note(f"layer {layer}")

    def wait_for_all(self) -> None:
        self._note("all")


def load(**covered: set[int]) -> ScriptedLoad:
    return ScriptedLoad(covered={name: frozenset(blocks) for name, blocks in covered.items()})


def test_several_requests_are_the_union() -> None:
    work = PageWork(loads=[load(full={1, 2}), load(full={4}, w={2})])
    assert sync_load_block_ids(work) == {"full": {1, 2, 4}, "w": {2}}


def test_what_remains_keeps_its_order() -> None:
    work = PageWork({"full": [5, 2, 9, 1, 3], "w": [2, 9]}, loads=[load(full={2, 1})])
    exclude_loaded(work)
    assert work.new_block_ids_to_zero == {"full": [5, 9, 3], "w": [2, 9]}


@pytest.mark.parametrize(
    "loads", [[], [load()], [load(full=set())]], ids=["none pending", "state only", "nothing whole"]
)
def test_loads_that_overwrite_no_block_of_attention_exclude_nothing(loads: list[ScriptedLoad]) -> None:
    ids = {"full": [5, 2, 9]}
    work = PageWork(ids, loads=list(loads))
    exclude_loaded(work)
    assert work.new_block_ids_to_zero is ids
    assert ids == {"full": [5, 2, 9]}


@pytest.mark.parametrize("nothing", [None, {}, {"full": []}])
def test_nothing_to_zero_stays_nothing(nothing: dict[str, list[int]] | None) -> None:
    work = PageWork(nothing, loads=[load(full={1})])
    exclude_loaded(work)
    assert not any((work.new_block_ids_to_zero or {}).values())


def test_of_a_copy_into_a_loaded_block_the_load_wins() -> None:
    into, beside = BlockCopy(group="full", source=0, destination=2), BlockCopy(group="full", source=0, destination=3)
    other = BlockCopy(group="w", source=0, destination=2)
    work = PageWork(copies=[into, beside, other], loads=[load(full={2})])
    exclude_loaded(work)
    assert work.copies == [beside, other]


@pytest.mark.parametrize(
    ("mode", "asked"),
    [
        ("layerwise", ["start", "states", "layer 0", "layer 1", "all"]),
        ("all_first", ["start", "all", "all"]),
    ],
)
def test_what_waits_for_what(mode: LoadMode, asked: list[str]) -> None:
    one = ScriptedLoad()
    barriers = LoadBarriers([one], mode)
    barriers.start()
    for layer in range(2):
        barriers.before_layer(layer)
    barriers.finish()
    assert one.asked == asked
    assert barriers.failed == {}


@pytest.mark.parametrize("fails_at", ["start", "states", "layer 1", "all"])
def test_a_failed_load_is_not_asked_again_and_spoils_nobody_else(
    fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = ScriptedLoad("bad", fails_at=fails_at), ScriptedLoad("good")
    barriers = LoadBarriers([bad, good], "layerwise")
    barriers.start()
    for layer in range(3):
        barriers.before_layer(layer)
    barriers.finish()
    assert barriers.failed == {"bad": f"nothing came at {fails_at}"}
    assert bad.asked[-1] == fails_at
    assert good.asked == ["start", "states", "layer 0", "layer 1", "layer 2", "all"]
    assert "the load of bad has failed" in caplog.text


class LateZeroer(Zeroer):
    """A fill that is queued, as on a GPU, and carried out when everything else is done."""

    def __init__(self, geometry: PoolGeometry, memory: torch.Tensor) -> None:
        super().__init__(geometry, memory)
        self._queued: list[Mapping[str, list[int]]] = []

    def zero(self, blocks: Mapping[str, list[int]]) -> None:  # type: ignore[override]
        self._queued.append(blocks)

    def carry_out(self) -> None:
        for blocks in self._queued:
            super().zero(blocks)


def landing(geometry: PoolGeometry, memory: torch.Tensor, blocks: list[int], rows: int) -> ScriptedLoad:
    """A load that writes `rows` tokens of each of these blocks of the group `full`, cell by cell, when it starts."""
    group = geometry.group("full")
    offsets = np.array(
        [
            layer.offset + block * layer.block_stride + head * layer.head_stride + token * layer.token_stride
            for layer in group.layers
            for block in blocks
            for head in range(group.num_heads)
            for token in range(rows)
        ],
        dtype=np.int64,
    )
    lengths = np.full(len(offsets), group.content_bytes, dtype=np.int64)

    def land() -> None:
        for offset in offsets:
            memory[offset : offset + group.content_bytes] = LANDED

    covered = covered_blocks(geometry, group, blocks, offsets, lengths)
    return ScriptedLoad(covered={"full": covered}, begin=land)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("excluding", [True, False])
def test_a_late_fill_wipes_pages_that_have_landed_unless_they_are_left_out(
    layout: str, excluding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not excluding:
        monkeypatch.setattr("engine.preparation.exclude_loaded", lambda work: None)
    geometry = geometry_of(layout)
    memory = filled(geometry)
    zeroer = LateZeroer(geometry, memory)
    work = PageWork({"full": [3, 1, 0], "w": [3]}, loads=[landing(geometry, memory, [1, 3], rows=3)])
    prepare(work, zeroer, BlockCopier(geometry, memory), "layerwise")
    zeroer.carry_out()
    for block in (1, 3):
        assert bool((memory[bytes_of(geometry, "full", block)] == (LANDED if excluding else 0)).all())
    for name, block in (("full", 0), ("w", 3)):
        assert bool((memory[bytes_of(geometry, name, block)] == 0).all())
    assert bool((memory[bytes_of(geometry, "full", 2)] == 7).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_that_is_loaded_in_part_is_zeroed_first(layout: str) -> None:
    geometry = geometry_of(layout)
    memory = filled(geometry)
    work = PageWork({"full": [1]}, loads=[landing(geometry, memory, [1], rows=2)])
    prepare(work, Zeroer(geometry, memory), BlockCopier(geometry, memory), "layerwise")
    cells = memory[bytes_of(geometry, "full", 1)].view(2, 2, 3, 8)  # layers, heads, tokens, content
    assert bool((cells[:, :, :2] == LANDED).all())
    assert bool((cells[:, :, 2] == 0).all())


def test_zero_then_copy_then_load() -> None:
    geometry = geometry_of("BLHNC")
    memory = filled(geometry)
    work = PageWork(
        {"full": [0, 1]},
        copies=[BlockCopy(group="full", source=2, destination=1)],
        loads=[landing(geometry, memory, [1], rows=2)],
    )
    prepare(work, Zeroer(geometry, memory), BlockCopier(geometry, memory), "layerwise")
    cells = memory[bytes_of(geometry, "full", 1)].view(2, 2, 3, 8)
    assert bool((cells[:, :, :2] == LANDED).all())
    assert bool((cells[:, :, 2] == 7).all())
    assert bool((memory[bytes_of(geometry, "full", 0)] == 0).all())
