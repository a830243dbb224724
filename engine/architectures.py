"""The model architectures that the engine is tested with.

All of them are decoders whose every layer attends to the whole context. What else a configuration may ask for (windows,
other kinds of layers, quantised weights, positions that depend on the company in a batch) is refused here, with the
reason, rather than computed wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUPPORTED = (
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)

SILENT: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "use_sliding_window": False},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "use_sliding_window": False, "head_dim": 128},
    "SmolLM3ForCausalLM": {"num_key_value_heads": 4, "use_sliding_window": False},
}
"""What the library takes where a configuration is silent. Elsewhere that is: as many KV heads as heads, heads that
share the hidden size evenly, no window."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that are a function of the position alone. The library computes `dynamic` and `longrope` from the
longest sequence of the batch, and keeps what it computed: one request would change another's."""

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's names, and whose code transformers loads them with."""


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with what the library takes where it is silent."""
    architectures = config.get("architectures") or [""]
    return {**SILENT.get(str(architectures[0]), {}), **config}


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a complete configuration cannot be served; None when it can."""
    architectures = config.get("architectures") or ["(none named)"]
    if architectures[0] not in SUPPORTED:
        return f"architecture {architectures[0]} is not supported; supported are {', '.join(SUPPORTED)}"
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        return f"its weights are quantised ({method}); use unquantised weights or a GGUF file"
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        return f"it has layers of types {', '.join(other)}; only full_attention is supported"
    for name in ("rope_parameters", "rope_scaling"):  # its name today, and the one of older folders
        rope = config.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind not in ROPE_TYPES:
            return f"its rotary embedding is of type {kind}; supported are {', '.join(ROPE_TYPES)}"
    # Qwen's configurations carry a window that is switched off.
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return f"it uses a sliding window of {config['sliding_window']} tokens, which is not supported"
    return None
