"""What the engine has to know of a model family before it loads one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from engine.layers import Layer

Config: TypeAlias = Mapping[str, Any]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A family of models that the engine is tested with.

    `architecture` is the name in a configuration's `architectures`, `title` the family's own. `describe` derives the
    layers from a configuration that `silent` has completed: what the library takes where a configuration says nothing.
    `refuse` (optional) says why a configuration of the family cannot be served, None when it can. `note` goes into the
    table of docs/models.md.
    """

    architecture: str
    title: str
    describe: Callable[[Config], tuple[Layer, ...]]
    silent: dict[str, Any] = msgspec.field(default_factory=dict)
    refuse: Callable[[Config], str | None] | None = None
    note: str = ""
