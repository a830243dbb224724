"""The families whose layers are attention alone.

A family's `silent` is what the library's configuration class assumes where a configuration says nothing; where that is
as many KV heads as heads, heads that share the hidden size evenly, and no window, nothing is written here.
"""

from __future__ import annotations

from engine.families.family import Config, Family
from engine.families.kinds_of_layers import SLIDING, every_nth_is_full, full, latent, mixed, windowed


def _refuse_window(config: Config) -> str | None:
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        return f"it speaks of a sliding window of {window} tokens, which models of this family do not have"
    return None


def _refuse_bidirectional(config: Config) -> str | None:
    return "its attention is bidirectional" if config.get("use_bidirectional_attention") else None


def _refuse_scaled_rope(config: Config) -> str | None:
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":  # whatever else it is called, the library makes it longrope
            return f"its rotary embedding is of type {kind}, which the library computes as longrope"
    return None


def _refuse_switched_off(config: Config) -> str | None:
    if SLIDING in (config.get("layer_types") or ()) and not config.get("use_sliding_window"):
        return "its layer_types name layers with a sliding window, and use_sliding_window is off"
    return None


def _from_max_window_layers(config: Config, index: int) -> bool:
    return bool(config["use_sliding_window"] and config["sliding_window"]) and index >= int(config["max_window_layers"])


def _where_there_is_no_rope(config: Config, index: int) -> bool:
    if not (config["use_sliding_window"] and config["sliding_window"]):
        return False
    with_rope = config.get("no_rope_layers")  # it is 1 where there is
    if with_rope is None:
        return (index + 1) % int(config["no_rope_layer_interval"]) == 0
    return not with_rope[index]


_QWEN = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

ATTENTION_FAMILIES = (
    Family(
        architecture="Cohere2ForCausalLM",
        title="Cohere2",
        describe=mixed(every_nth_is_full(4, "sliding_window_pattern")),
        silent={"sliding_window": 4096},
        note="no positions in the full layers",
    ),
    Family(
        architecture="DeepseekV2ForCausalLM",
        title="DeepSeek-V2",
        describe=latent,
        silent={"kv_lora_rank": 512, "qk_rope_head_dim": 64},
        note="latent attention: the latent is what is paged; mixture of experts",
    ),
    Family(
        architecture="DeepseekV3ForCausalLM",
        title="DeepSeek-V3",
        describe=latent,
        silent={"kv_lora_rank": 512, "qk_rope_head_dim": 64},
        note="latent attention: the latent is what is paged; mixture of experts",
    ),
    Family(
        architecture="Gemma2ForCausalLM",
        title="Gemma 2",
        describe=mixed(every_nth_is_full(2)),
        silent={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
        refuse=_refuse_bidirectional,
        note="softcaps of scores and logits",
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        title="Gemma 3 (text)",
        describe=mixed(every_nth_is_full(6, "sliding_window_pattern")),
        silent={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
        refuse=_refuse_bidirectional,
        note="another rotary base in the window layers",
    ),
    Family(
        architecture="Glm4ForCausalLM",
        title="GLM-4",
        describe=full,
        silent={"num_key_value_heads": 2, "head_dim": 128},
        refuse=_refuse_window,
    ),
    Family(
        architecture="GptOssForCausalLM",
        title="gpt-oss",
        describe=mixed(every_nth_is_full(2)),
        silent={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
        note="attention sinks; mixture of experts; unquantised weights only",
    ),
    Family(architecture="GraniteForCausalLM", title="Granite", describe=full, refuse=_refuse_window),
    Family(architecture="LlamaForCausalLM", title="Llama", describe=full, refuse=_refuse_window),
    Family(
        architecture="MistralForCausalLM",
        title="Mistral",
        describe=windowed,
        silent={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        architecture="MixtralForCausalLM",
        title="Mixtral",
        describe=windowed,
        silent={"num_key_value_heads": 8},
        note="mixture of experts",
    ),
    Family(architecture="Olmo2ForCausalLM", title="OLMo 2", describe=full, refuse=_refuse_window),
    Family(
        architecture="Olmo3ForCausalLM",
        title="OLMo 3",
        describe=mixed(every_nth_is_full(4)),
        silent={"sliding_window": 4096},
    ),
    Family(
        architecture="OlmoeForCausalLM",
        title="OLMoE",
        describe=full,
        refuse=_refuse_window,
        note="mixture of experts",
    ),
    Family(
        architecture="Phi3ForCausalLM",
        title="Phi-3",
        describe=windowed,
        refuse=_refuse_scaled_rope,
        note="only without scaled rotary embeddings",
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        title="Qwen2",
        describe=mixed(_from_max_window_layers),
        silent=_QWEN,
        refuse=_refuse_switched_off,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        title="Qwen3",
        describe=mixed(_from_max_window_layers),
        silent={**_QWEN, "head_dim": 128},
        refuse=_refuse_switched_off,
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        title="Qwen3 MoE",
        describe=windowed,
        silent={"num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096},
        note="mixture of experts",
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        title="SmolLM3",
        describe=mixed(_where_there_is_no_rope),
        silent={
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
        },
        refuse=_refuse_switched_off,
        note="no positions in some layers",
    ),
    Family(
        architecture="Starcoder2ForCausalLM",
        title="StarCoder2",
        describe=windowed,
        silent={"num_key_value_heads": 2},
    ),
)
