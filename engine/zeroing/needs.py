"""Whether a pool has to be zeroed at all."""

from __future__ import annotations

from collections.abc import Sequence

from connector.pages import Group, GroupSpec


def needs_kv_cache_zeroing(groups: Sequence[Group]) -> bool:
    """A pool with recurrent states, or with caches of more than one precision: what one of them left behind may be NaN
    to another."""
    precisions = {group.itemsize for group in groups if isinstance(group, GroupSpec)}
    return len(precisions) > 1 or any(not isinstance(group, GroupSpec) for group in groups)
