"""What each kind of group keeps, and where it can be resumed."""

from __future__ import annotations

import pytest

from connector.pages import GroupSpec, StateSpec
from engine.blocks import StateSlots, kind_of
from engine.blocks.index import Content, PrefixIndex
from engine.blocks.kinds import Chunked, Kind, WholeContext, Window

HASHES = [bytes([number]) for number in range(8)]


def index_of(*blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    for block in blocks:
        index.add(block, Content(b"", (), HASHES[block]))
    return index


@pytest.mark.parametrize(
    ("kind", "position", "first"),
    [
        (WholeContext(), 100, 0),
        (Window(1), 5, 5),
        (Window(4), 2, 0),
        (Window(4), 3, 0),
        (Window(4), 4, 1),
        (Chunked(4), 3, 0),
        (Chunked(4), 4, 4),
        (Chunked(4), 7, 4),
        (StateSlots(True), 7, 0),
    ],
)
def test_the_first_token_that_is_seen(kind: Kind, position: int, first: int) -> None:
    assert kind.first_visible(position) == first


@pytest.mark.parametrize(
    ("kind", "cached", "most", "longest"),
    [
        (WholeContext(), (0, 1, 3), 5, 2),
        (WholeContext(), (1, 2), 5, 0),
        (WholeContext(), (0, 1, 2, 3), 3, 3),
        # The query after block n - 1 sees the last 3 tokens, blocks being 2 long: one block and a token before it.
        (Window(4), (3, 4), 5, 5),
        (Window(4), (2, 4), 5, 0),
        (Window(4), (2, 3), 5, 4),
        (Window(4), (0,), 5, 1),
        (Window(4), (0,), 0, 0),
        (Window(1), (), 5, 5),
        (Chunked(4), (4,), 5, 5),
        (Chunked(4), (1,), 5, 4),
        (Chunked(4), (), 3, 2),
        (Chunked(4), (), 1, 0),
        (StateSlots(True), (1, 4), 4, 2),
        (StateSlots(True), (1, 4), 5, 5),
        (StateSlots(True), (), 5, 0),
        (StateSlots(False), (4,), 5, 0),
    ],
)
def test_after_how_many_blocks_it_can_be_resumed(kind: Kind, cached: tuple[int, ...], most: int, longest: int) -> None:
    assert kind.longest(most, HASHES, index_of(*cached), 2) == longest


@pytest.mark.parametrize(
    ("kind", "tokens", "step", "blocks"),
    [
        (WholeContext(), 17, 4, 5),
        (Window(8), 100, 4, 4),
        (Window(8), 9, 4, 3),
        (Chunked(8), 100, 4, 4),
        (StateSlots(True), 100, 4, 1),
    ],
)
def test_how_many_blocks_a_sequence_holds_at_most(kind: Kind, tokens: int, step: int, blocks: int) -> None:
    assert kind.most_blocks(tokens, step, 4) == blocks


@pytest.mark.parametrize("step", [1, 3, 4, 5])
@pytest.mark.parametrize("kind", [Window(1), Window(5), Window(8), Chunked(8), Chunked(4)])
def test_no_sequence_ever_holds_more(kind: Kind, step: int) -> None:
    most = 0
    for first in range(step):
        for computed in [0, *range(first, 60, step)]:
            low = kind.first_visible(computed) // 4
            most = max(most, -(-(computed + step) // 4) - low)
    assert most <= kind.most_blocks(1000, step, 4)


def test_each_spec_has_its_rule() -> None:
    def attention(kind: str) -> GroupSpec:
        return GroupSpec(name="g", layers=(0,), num_kv_heads=1, key_dim=2, value_dim=2, itemsize=2, kind=kind)  # type: ignore[arg-type]

    state = StateSpec(name="s", layers=(0,), conv_bytes=4, ssm_bytes=4, conv_dtype="float32", ssm_dtype="float32")
    assert kind_of(attention("full")) == WholeContext()
    assert kind_of(attention("latent")) == WholeContext()
    assert kind_of(attention("window"), window=7) == Window(7)
    assert kind_of(attention("chunked"), window=7) == Chunked(7)
    assert kind_of(state, aligned=True) == StateSlots(True)
