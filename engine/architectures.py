"""The model architectures that the engine is tested with.

All of them are decoders whose every layer attends to the whole context. What else a configuration may ask for (windows,
other kinds of layers, quantised weights) is refused here, with the reason, rather than computed wrongly.
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

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's names, and whose code transformers loads them with."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a configuration cannot be served; None when it can."""
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
    # Qwen's configurations carry a window that is switched off.
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return f"it uses a sliding window of {config['sliding_window']} tokens, which is not supported"
    return None
