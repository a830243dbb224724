"""Hashes of blocks by content."""

from __future__ import annotations

import pytest

from engine.blocks import HashChain, root_hash


def test_equal_prefixes_have_equal_hashes_and_others_do_not() -> None:
    one, other = HashChain(root_hash("m"), 4), HashChain(root_hash("m"), 4)
    first, second = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 6, 7, 8]
    assert one.of(first, 2)[0] == other.of(second, 2)[0]
    assert one.of(first, 2)[1] != other.of(second, 2)[1]


def test_a_block_is_not_its_tokens_alone() -> None:
    chain = HashChain(root_hash("m"), 2)
    hashes = chain.of([1, 2, 1, 2, 1, 2], 3)
    assert len(set(hashes[:3])) == 3


def test_model_adapter_and_salt_keep_apart_and_cannot_run_into_each_other() -> None:
    roots = [
        root_hash("m"),
        root_hash("m", "a"),
        root_hash("m", "", "a"),
        root_hash("ma"),
        root_hash("m", "ab", "c"),
        root_hash("m", "a", "bc"),
        root_hash("other"),
    ]
    assert len({HashChain(root, 1).of([5], 1)[0] for root in roots}) == len(roots)


def test_it_grows_with_the_sequence() -> None:
    chain = HashChain(root_hash("m"), 2)
    tokens = [1, 2]
    begun = list(chain.of(tokens, 1))
    tokens += [3, 4]
    assert chain.of(tokens, 2)[:1] == begun
    assert chain.parent(0) == chain.root
    assert chain.parent(2) == chain.of(tokens, 2)[1]


def test_a_block_that_is_not_full_has_no_hash() -> None:
    with pytest.raises(ValueError, match="block 1 of 3 tokens is not full"):
        HashChain(root_hash("m"), 2).of([1, 2, 3], 2)
