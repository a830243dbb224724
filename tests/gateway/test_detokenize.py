from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenize import Detokenizer, Vocabulary
from tests.gateway.folders import KINDS

BEYOND_THE_VOCABULARY = 5000


@cache
def backend(kind: str) -> Any:
    return KINDS[kind]()


@cache
def vocabulary(kind: str) -> Vocabulary:
    return Vocabulary(backend(kind))


def pieces_of(kind: str, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(vocabulary(kind))
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def token_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids: special ones and ids that no token has among them; and those whose bytes are half characters, often."""
    size = backend(kind).get_vocab_size()
    broken = [number for number in range(size) if "\ufffd" in vocabulary(kind).decode([number])]
    choices = [st.integers(0, size - 1), st.just(BEYOND_THE_VOCABULARY)]
    if broken:
        choices.append(st.sampled_from(broken))
    return st.lists(st.one_of(choices), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_what_decoding_all_at_once_gives(kind: str, data: st.DataObject) -> None:
    ids = data.draw(token_ids(kind))
    assert "".join(pieces_of(kind, ids)) == backend(kind).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_encoded_text_comes_back_as_decoding_gives_it(kind: str, text: str) -> None:
    ids = backend(kind).encode(text).ids
    assert "".join(pieces_of(kind, ids)) == backend(kind).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("text", ["😀", "a😀b", "👩‍👩‍👧 und ü", "数数数", "🏳️‍🌈🏳️‍🌈"])
def test_no_half_character_is_ever_given_out(kind: str, text: str) -> None:
    pieces = pieces_of(kind, backend(kind).encode(text).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_complete_character_is_given_out_at_once() -> None:
    kind = "byte level"
    ids = [number for byte in "é".encode() for number in [single_byte(byte)]]
    assert pieces_of(kind, ids) == ["", "é", ""]


def test_text_before_half_a_character_is_given_out_at_once() -> None:
    ids = [single_byte(ord("x")), single_byte(0xF0), single_byte(0x9F)]
    assert pieces_of("byte level", ids) == ["x", "", "", "\ufffd"]


def test_bytes_that_complete_nothing_are_given_out_as_soon_as_that_is_certain() -> None:
    ids = [single_byte(0x80)] * 50
    pieces = pieces_of("byte level", ids)
    assert pieces == ["", *["\ufffd"] * 49, "\ufffd"]


def test_a_run_of_byte_tokens_is_held_until_another_token_ends_it() -> None:
    tokens = backend("byte fallback")
    ids = [tokens.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()] + [tokens.token_to_id("e")]
    assert pieces_of("byte fallback", ids) == ["", "", "", "", "😀e", ""]


def test_a_leading_special_token_does_not_eat_the_space_of_the_second_word() -> None:
    tokens = backend("metaspace")
    word = next(token for token in tokens.get_vocab() if token.startswith("▁") and len(token) > 2)
    ids = [
        tokens.token_to_id("<s>"),
        tokens.token_to_id(word),
        tokens.token_to_id("<|user|>"),
        tokens.token_to_id(word),
    ]
    plain = word[1:]
    assert pieces_of("metaspace", ids) == ["", plain, "", f" {plain}", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_releases_what_is_held_once(kind: str) -> None:
    detokenizer = Detokenizer(vocabulary(kind))
    for token_id in backend(kind).encode("数").ids[:-1]:
        detokenizer.push(token_id)
    detokenizer.flush()
    assert detokenizer.flush() == ""


def test_the_window_stays_short_whatever_comes() -> None:
    """Work per token does not grow with the answer."""
    detokenizer = Detokenizer(vocabulary("byte level"))
    for _ in range(200):
        detokenizer.push(single_byte(0x9F))
        assert len(detokenizer._window) <= 4


def single_byte(byte: int) -> int:
    """The byte-level token of one byte."""
    tokens = backend("byte level")
    ids = tokens.encode(chr(byte), add_special_tokens=False).ids if byte < 0x80 else []
    if ids:
        return int(ids[0])
    for number in range(tokens.get_vocab_size()):
        if bytes_of(tokens.id_to_token(number)) == bytes([byte]):
            return number
    raise AssertionError(f"no token for byte {byte:#x}")


@cache
def characters_of_bytes() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others are moved up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(moved)}


def bytes_of(token: str) -> bytes | None:
    alphabet = characters_of_bytes()
    return bytes(alphabet[character] for character in token) if all(c in alphabet for c in token) else None
