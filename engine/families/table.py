"""The table of families in docs/models.md: `python -m engine.families.table` prints the whole page."""

from __future__ import annotations

from engine.families import FAMILIES, GGUF_ARCHITECTURES
from engine.families.refused import REFUSED
from engine.families.rope import ROPE_TYPES

INTRODUCTION = """\
# Models

Generated from `engine/families` by `make generate`. Every family is tested on tiny random models in float32: greedy
answers equal those of transformers' `generate`, and logits of a prompt in chunks those of the whole prompt within 1e-4.

`engine.LLM` runs all of them in one process. Separate prefill and decode workers take models whose layers all see the
whole context; one that has layers with a window is refused when they start.
"""


def page() -> str:
    """The whole page, as Markdown."""
    rows = "".join(
        f"| {family.title} | `{family.architecture}` | {family.note} |\n"
        for family in sorted(FAMILIES.values(), key=lambda one: one.title.casefold())
    )
    refused = "".join(f"| `{name}` | {reason} |\n" for name, reason in sorted(REFUSED.items()))
    gguf = ", ".join(f"`{name}`" for name in sorted(GGUF_ARCHITECTURES))
    return (
        f"{INTRODUCTION}\n"
        f"| family | architecture | remarks |\n|---|---|---|\n{rows}\n"
        f"GGUF files are read of the architectures {gguf}. Rotary embeddings may be of the types "
        f"{', '.join(ROPE_TYPES)}.\nQuantised weights are refused, except in GGUF files.\n\n"
        "Everything else is refused. Of these it is known what goes wrong:\n\n"
        f"| architecture | why |\n|---|---|\n{refused}"
    )


if __name__ == "__main__":
    print(page(), end="")
