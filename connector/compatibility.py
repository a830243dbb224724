"""What two workers must agree on before a page of one means anything to the other."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from connector.pages import Group

Value: TypeAlias = str | int | None
Differences: TypeAlias = dict[str, tuple[Value, Value]]
"""Field -> (ours, theirs)."""

TRANSLATED = ("layout", "block_size")
"""What plans translate: workers may differ in it. It is told all the same, for whoever looks for slow transfers."""


class CompatibilityRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that gives the bytes of a page their meaning. Shapes in `groups` are per rank."""

    model_fingerprint: str
    dtype: str
    cache_dtype: str
    layout: str
    block_size: int
    groups: tuple[Group, ...]
    tp_size: int = 1
    tp_rank: int = 0
    mode: str = "read"


def find_differences(ours: CompatibilityRecord, theirs: CompatibilityRecord) -> Differences:
    """The fields in which the records differ, with both values; groups are compared field by field, by name."""
    mine, other = _flatten(ours), _flatten(theirs)
    return {
        field: (mine.get(field), other.get(field))
        for field in [*mine, *(field for field in other if field not in mine)]
        if mine.get(field) != other.get(field)
    }


def _flatten(record: CompatibilityRecord) -> dict[str, Value]:
    flat: dict[str, Value] = {
        field: value
        for field, value in msgspec.structs.asdict(record).items()
        if field != "groups" and field not in TRANSLATED
    }
    flat["groups"] = ", ".join(group.name for group in record.groups)
    for group in record.groups:
        for field, value in msgspec.structs.asdict(group).items():
            flat[f"groups.{group.name}.{field}"] = str(list(value)) if field == "layers" else value
    return flat
