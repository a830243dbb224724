"""The model families that the engine serves: one allowlist, from which docs/models.md is generated.

What a configuration may ask for besides (quantised weights, positions that depend on the company in a batch, other
kinds of layers) is refused here, with the reason, rather than computed wrongly. No torch in here: a folder is looked at
before anything is loaded.
"""

from __future__ import annotations

from typing import Any

from engine.families.attention import ATTENTION_FAMILIES
from engine.families.family import Config, Family
from engine.families.kinds_of_layers import FULL, SLIDING
from engine.families.refused import REFUSED
from engine.families.rope import refuse_rope
from engine.layers import Layer

__all__ = ["FAMILIES", "GGUF_ARCHITECTURES", "Family", "complete", "describe", "refusal"]

FAMILIES: dict[str, Family] = {family.architecture: family for family in (*ATTENTION_FAMILIES,)}
"""By the name in a configuration's `architectures`."""

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's names, and whose code transformers loads them with."""


def complete(config: Config) -> dict[str, Any]:
    """A configuration with what the library takes where it is silent."""
    family = FAMILIES.get(_architecture(config))
    return {**(family.silent if family else {}), **config}


def refusal(config: Config) -> str | None:
    """Why a complete configuration cannot be served; None when it can."""
    architecture = _architecture(config)
    family = FAMILIES.get(architecture)
    if family is None:
        reason = REFUSED.get(architecture, "")
        return (
            f"architecture {architecture} is not supported{reason and f' ({reason})'}; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        return f"its weights are quantised ({method}); use unquantised weights or a GGUF file"
    other = sorted(set(config.get("layer_types") or ()) - {FULL, SLIDING})
    if other:
        return f"it has layers of types {', '.join(other)}, which are not supported"
    return refuse_rope(config) or (family.refuse(config) if family.refuse else None)


def describe(config: Config) -> tuple[Layer, ...]:
    """The layers of a complete configuration that `refusal` has nothing against.

    Raises:
        KeyError, TypeError, ValueError: it lacks or garbles a size.
    """
    return FAMILIES[_architecture(config)].describe(config)


def _architecture(config: Config) -> str:
    architectures = config.get("architectures") or ["(none named)"]
    return str(architectures[0])
