"""Rotary embeddings: which of the library's are a function of the position alone."""

from __future__ import annotations

from engine.families.family import Config

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The library computes `dynamic` and `longrope` from the longest sequence of the batch, and keeps what it computed: one
request would change another's."""


def refuse_rope(config: Config) -> str | None:
    """Why a configuration's rotary embeddings cannot be served; None when they can. Some have one for each type."""
    for name in ("rope_parameters", "rope_scaling"):  # its name today, and the one of older folders
        rope = config.get(name) or {}
        if not isinstance(rope, dict):
            return f"its {name} is {rope!r}, which says nothing about a rotary embedding"
        for one in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):
            kind = one.get("rope_type", one.get("type", "default"))
            if kind not in ROPE_TYPES:
                return f"its rotary embedding is of type {kind}; supported are {', '.join(ROPE_TYPES)}"
    return None
