from __future__ import annotations

import numpy as np
import pytest

from connector import PlanError
from connector.correspondence import Chunks, Correspondence
from tests.connector.geometries import every_group


def of(
    source: list[int],
    destination: list[int],
    num_tokens: int,
    group: str = "full",
    sizes: tuple[int, int] = (4, 4),
    local_tokens: int = 0,
) -> Correspondence:
    there, here = (every_group("BLHNC", size) for size in sizes)
    return Correspondence(there, source, here, destination, group, num_tokens, local_tokens)


def tokens(pair: Correspondence, first: int = 0, end: int | None = None) -> dict[tuple[int, int], tuple[int, int]]:
    """(destination block, row) -> (source block, row), of every token."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for chunks in pair.chunks(first, pair.num_tokens if end is None else end):
        for at in range(len(chunks.source_block)):
            for row in range(chunks.tokens):
                there = int(chunks.source_block[at]), int(chunks.source_row[at]) + row
                found[int(chunks.destination_block[at]), int(chunks.destination_row[at]) + row] = there
    return found


def test_blocks_of_one_size_move_whole_also_the_last() -> None:
    (chunks,) = of([5, 6, 7], [1, 2, 3], 9).chunks(0, 9)
    assert isinstance(chunks, Chunks)
    assert (chunks.tokens, chunks.source_block.tolist(), chunks.destination_block.tolist()) == (4, [5, 6, 7], [1, 2, 3])


def test_the_lists_are_aligned_at_their_ends() -> None:
    """Aligned at the front, the source's prefix would land in the destination's suffix."""
    pair = of([5, 6, 7], [1], 9, local_tokens=8)
    assert pair.first_token == 8
    assert set(tokens(pair)) == {(1, row) for row in range(4)}
    assert tokens(pair)[1, 0] == (7, 0)


@pytest.mark.parametrize("local_tokens", [8, 12, -4, 3])
def test_what_is_had_is_whole_blocks_and_not_everything(local_tokens: int) -> None:
    with pytest.raises(PlanError, match=f"the destination has {local_tokens} of 8 tokens"):
        of([5, 6], [1], 8, local_tokens=local_tokens)


def test_a_destination_names_exactly_what_it_lacks() -> None:
    with pytest.raises(PlanError, match="names 1 blocks of group 'full' for tokens 4 to 12; 2 blocks"):
        of([5, 6, 7], [1], 12, local_tokens=4)


def test_a_part_of_the_tokens() -> None:
    pair = of([5, 6, 7], [1, 2, 3], 12)
    assert set(tokens(pair, 4, 8).values()) == {(6, row) for row in range(4)}
    assert tokens(pair, 8, 8) == {}


@pytest.mark.parametrize("sizes", [(4, 6), (6, 4), (8, 2), (2, 8), (3, 7), (5, 5)])
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 23])
def test_every_token_goes_where_it_belongs_whatever_the_block_sizes(sizes: tuple[int, int], num_tokens: int) -> None:
    random = np.random.default_rng(num_tokens)
    mine, other = (-(-num_tokens // size) for size in sizes)
    source, destination = (random.permutation(12)[:count].tolist() for count in (mine, other))
    for missing in {other, max(1, other - 1)}:
        local_tokens = (other - missing) * sizes[1]
        pair = of(source, destination[other - missing :], num_tokens, sizes=sizes, local_tokens=local_tokens)
        found = tokens(pair)
        for token in range(local_tokens, num_tokens):
            here = destination[token // sizes[1]], token % sizes[1]
            assert found.pop(here) == (source[token // sizes[0]], token % sizes[0])
        if sizes[0] != sizes[1]:
            assert found == {}


def test_a_windowed_group_may_lack_its_oldest_blocks_on_both_sides() -> None:
    pair = of([3, 4], [7], 20, group="window")
    assert pair.first_token == 16
    assert tokens(pair)[7, 0] == (4, 0)


def test_a_source_that_lacks_what_is_wanted_is_refused() -> None:
    with pytest.raises(PlanError, match="wants group 'window' from token 4, the source's 2 blocks begin with token 12"):
        of([3, 4], [5, 6, 7, 8], 20, group="window")


def test_a_state_slot_has_one_row_whatever_the_number_of_tokens() -> None:
    pair = of([2], [1], 1000, group="state", sizes=(4, 8))
    assert pair.num_tokens == 1
    assert tokens(pair) == {(1, 0): (2, 0)}
    with pytest.raises(PlanError, match="wants group 'state' from token 0, the source's 0 blocks"):
        of([], [1], 1000, group="state")
