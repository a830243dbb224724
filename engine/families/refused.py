"""Families that the library would load, and that it computes wrongly once a prompt comes in chunks.

Whoever asks for one is told why, rather than that the name is unknown. Each was tried with transformers 5.24.
"""

from __future__ import annotations

_LLAMA4 = "the library's mask of its chunked layers is wrong when a prompt is computed in pieces"

REFUSED: dict[str, str] = {
    "JambaForCausalLM": "the library's recurrent layers forget their state when a prompt is computed in pieces",
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "Zamba2ForCausalLM": "its shared attention layers cannot be told apart, so their pages would overwrite one another",
}
