from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.fields import Fields, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ('a\n"ü"', '"a\\n\\"ü\\""'),
        ("x" * 100, '"' + "x" * 80 + '"…'),
        (10**1000, "a number of more than 80 digits"),
        (-(10**90), "a number of more than 80 digits"),
        ([1, "a", None], '[1, "a", null]'),
        ([0] * 1_000_000, "[0, 0, 0, 0, …]"),
        ([[[[1]]]], "[[[…]]]"),
        ({"a": {"b": {"c": 1}}}, '{"a": {"b": {…}}}'),
        ([], "[]"),
        ({}, "{}"),
    ],
)
def test_values_are_shown_as_json_and_short(value: Any, text: str) -> None:
    assert shown(value) == text


def test_nested_objects_name_their_fields_in_full() -> None:
    options = Fields({"stream_options": {"include_usage": 1}}).object("stream_options")
    assert options is not None
    with pytest.raises(ApiError) as caught:
        options.boolean("include_usage", False)
    assert caught.value.param == "stream_options.include_usage"
    assert str(caught.value) == "stream_options.include_usage must be true or false, got 1"


@pytest.mark.parametrize("value", [0, 2, 1.0, 0.5])
def test_bounds_are_part_of_the_range(value: float) -> None:
    assert Fields({"x": value}).number("x", 1.0, 0.0, 2.0) == value


@pytest.mark.parametrize("value", [-1e-9, 2.0000001, float("nan"), float("inf"), 10**400, True, "1"])
def test_numbers_beyond_them_are_refused(value: Any) -> None:
    with pytest.raises(ApiError, match="x must be a number from 0 to 2"):
        Fields({"x": value}).number("x", 1.0, 0.0, 2.0)
