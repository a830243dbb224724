"""Sizes and durations as people write them.

A setting's unit is the end of its name: `…_bytes` takes "1GiB" as well as 1073741824, `…_s` takes "500ms" as well as
0.5. KiB, MiB, GiB and TiB are powers of 1024; kB, MB, GB and TB powers of 1000.
"""

from __future__ import annotations

import re

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")

BYTES = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_bytes(text: str) -> int:
    """The number of bytes that `text` names, e.g. "1.5GiB".

    Raises:
        ValueError: for an unknown unit, or what is not a whole number of bytes.
    """
    size = _parse(text, BYTES)
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_seconds(text: str) -> float:
    """The number of seconds that `text` names, e.g. "500ms".

    Raises:
        ValueError: for an unknown unit.
    """
    return _parse(text, SECONDS)


def _parse(text: str, units: dict[str, int] | dict[str, float]) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not a number with one of the units {', '.join(filter(None, units))}")
    return float(match[1]) * units[match[2]]
