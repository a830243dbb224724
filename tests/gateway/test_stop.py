from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stop import StopStrings


def reference(text: str, strings: list[str]) -> tuple[str, bool]:
    """The rule, word for word: the first character that completes a stop string; of those it completes, the longest."""
    for end in range(1, len(text) + 1):
        completed = [len(string) for string in strings if text[:end].endswith(string)]
        if completed:
            return text[: end - max(completed)], True
    return text, False


def run(pieces: list[str], strings: list[str]) -> tuple[str, bool]:
    stops = StopStrings(strings)
    text = "".join(stops.push(piece) for piece in pieces)
    return text + stops.flush(), stops.stopped


letters = st.text("ab<|", max_size=14)
stop_lists = st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=4)


@settings(max_examples=200, deadline=None)
@given(text=letters, strings=stop_lists)
def test_every_cut_in_two_gives_what_the_whole_text_gives(text: str, strings: list[str]) -> None:
    expected = reference(text, strings)
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]], strings) == expected


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(letters, max_size=8), strings=stop_lists)
def test_any_pieces_and_single_characters_give_what_the_whole_text_gives(pieces: list[str], strings: list[str]) -> None:
    text = "".join(pieces)
    assert run(pieces, strings) == run(list(text), strings) == reference(text, strings)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(letters, max_size=8), strings=stop_lists)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(pieces: list[str], strings: list[str]) -> None:
    stops = StopStrings(strings)
    text = given_out = ""
    for piece in pieces:
        text += piece
        given_out += stops.push(piece)
        if stops.stopped:
            return
        prefixes = {string[:length] for string in strings for length in range(len(string))}
        longest = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        assert given_out == text[: len(text) - longest]


@pytest.mark.parametrize("tail", ["<", "<|", "<|en"])
def test_an_answer_that_ends_in_half_a_stop_string_keeps_it(tail: str) -> None:
    assert run(["x", tail], ["<|end|>"]) == (f"x{tail}", False)


def test_an_answer_of_nothing_but_half_a_stop_string_keeps_it() -> None:
    assert run(["<", "|"], ["<|end|>"]) == ("<|", False)


def test_held_text_is_released_once() -> None:
    stops = StopStrings(["ab"])
    assert stops.push("xa") == "x"
    assert stops.flush() == "a"
    assert stops.flush() == ""


def test_nothing_comes_after_a_stop() -> None:
    stops = StopStrings(["."])
    assert stops.push("One. Two.") == "One"
    assert stops.push("Three") == ""
    assert stops.flush() == ""
    assert stops.stopped


def test_without_stop_strings_text_passes() -> None:
    assert run(["a", "", "b"], []) == ("ab", False)
