"""What lies in which block."""

from __future__ import annotations

from engine.blocks.index import SIBLINGS, Content, PrefixIndex


def test_a_full_block_is_found_by_its_hash_and_by_its_beginning() -> None:
    index = PrefixIndex()
    assert index.add(7, Content(b"p", (1, 2, 3), b"h"))
    assert index.find(b"h") == 7
    assert index.find(b"p") is None
    assert index.find_beginning(b"p", [1, 2, 9]) == (7, 2)
    assert index.find_beginning(b"p", [9]) is None
    assert index.find_beginning(b"h", [1]) is None


def test_the_longest_common_beginning_wins_the_latest_of_equals() -> None:
    index = PrefixIndex()
    index.add(1, Content(b"p", (1, 2), None))
    index.add(2, Content(b"p", (1, 2, 3, 4), b"h"))
    index.add(3, Content(b"p", (1, 2, 3), None))
    assert index.find_beginning(b"p", [1, 2, 3, 4, 5]) == (2, 4)
    assert index.find_beginning(b"p", [1, 2]) == (3, 2)


def test_what_is_known_is_not_added_again() -> None:
    index = PrefixIndex()
    assert index.add(1, Content(b"p", (1,), b"h"))
    assert not index.add(2, Content(b"p", (1,), b"h"))
    assert not index.add(1, Content(b"q", (2,), b"i"))
    assert 2 not in index
    assert len(index) == 1


def test_what_is_removed_is_gone_everywhere() -> None:
    index = PrefixIndex()
    index.add(1, Content(b"p", (1, 2), b"h"))
    index.remove(1)
    index.remove(1)
    assert (index.find(b"h"), index.find_beginning(b"p", [1, 2]), len(index)) == (None, None, 0)
    assert index._children == {}


def test_only_some_siblings_are_looked_through() -> None:
    index = PrefixIndex()
    for block in range(SIBLINGS + 1):
        index.add(block, Content(b"p", (block, 1), None))
    assert index.find_beginning(b"p", [1, 1]) == (1, 2)
    assert index.find_beginning(b"p", [0, 1]) is None
