"""Reading the fields of a JSON object, each with its type and bounds, so that an error names the field and the value.

A field that is absent or null takes its default: clients send null for "not set". Booleans are no numbers here, and
numbers that a field cannot hold are refused rather than rounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.errors import ApiError, bad_request

SHOWN_CHARACTERS = 80
SHOWN_ITEMS = 4


class Fields:
    """One JSON object; `path` is where it is in the request, "" for the request itself."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self._path = path

    def param(self, name: str) -> str:
        """The field as an error names it, e.g. `stream_options.include_usage`."""
        return f"{self._path}.{name}" if self._path else name

    def wrong(self, name: str, expected: str) -> ApiError:
        """400: the field is not what it has to be."""
        return wrong(self.param(name), self.values[name], expected)

    def required(self, name: str) -> Any:
        """The field's value; 400 when it is absent or null."""
        value = self.values.get(name)
        if value is None:
            raise bad_request(f"{self.param(name)} is required", self.param(name), "missing_required_parameter")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, default: int | None, at_least: int, at_most: int) -> int | None:
        """A whole number within bounds, which are part of it."""
        value = self.values.get(name)
        if value is None:
            return default
        if not is_integer(value) or not at_least <= value <= at_most:
            raise self.wrong(name, f"an integer from {at_least} to {at_most}")
        return int(value)

    def number(self, name: str, default: float, at_least: float, at_most: float) -> float:
        """A number within bounds, which are part of it."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not at_least <= value <= at_most:
            raise self.wrong(name, f"a number from {at_least:g} to {at_most:g}")
        return float(value)

    def text(self, name: str) -> str | None:
        """Text."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "text")
        return value

    def object(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, self.param(name))


def is_integer(value: object) -> bool:
    """True for a JSON integer; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def wrong(param: str, value: object, expected: str) -> ApiError:
    """400: `param` has a value that it cannot have."""
    return bad_request(f"{param} must be {expected}, got {shown(value)}", param)


def shown(value: object, levels: int = 2) -> str:
    """A value as JSON, shortened: however large it is, this takes no time."""
    match value:
        case str():
            text = json.dumps(value[:SHOWN_CHARACTERS], ensure_ascii=False)
            return text if len(value) <= SHOWN_CHARACTERS else f"{text}…"
        case int() if abs(value) >= 10**SHOWN_CHARACTERS:
            return f"a number of more than {SHOWN_CHARACTERS} digits"
        case list():
            items = [shown(item, levels - 1) for item in value[:SHOWN_ITEMS]] if levels else []
            return f"[{_joined(items, len(value))}]"
        case dict():
            first = list(value.items())[:SHOWN_ITEMS] if levels else []
            return f"{{{_joined([f'{shown(key)}: {shown(item, levels - 1)}' for key, item in first], len(value))}}}"
        case _:
            return json.dumps(value)


def _joined(items: list[str], count: int) -> str:
    return ", ".join([*items, "…"] if count > len(items) else items)
