"""Tiny models with random weights, as folders on disk, and what transformers alone makes of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import ModelInfo, inspect_model

VOCABULARY = 199
LAYERS = 2

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,  # the usual 0.02 makes all logits nearly equal
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 6
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}

LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}

MODEL_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Cohere2ForCausalLM": ("cohere2", {**MIXED, "logit_scale": 0.5}),
    "DeepseekV2ForCausalLM": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {**LATENT, "q_lora_rank": 16}),
    "Gemma2ForCausalLM": (
        "gemma2",
        {
            **MIXED,
            "head_dim": 12,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 9,
        },
    ),
    "Gemma3ForCausalLM": ("gemma3_text", {**MIXED, "head_dim": 12, "query_pre_attn_scalar": 9}),
    "Glm4ForCausalLM": ("glm4", {"head_dim": 16}),
    "GptOssForCausalLM": ("gpt_oss", {**MIXED, **EXPERTS, "num_local_experts": 4, "head_dim": 8}),
    "GraniteForCausalLM": ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {"sliding_window": WINDOW}),
    "MixtralForCausalLM": ("mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": None}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "Olmo3ForCausalLM": ("olmo3", MIXED),
    "OlmoeForCausalLM": ("olmoe", {**EXPERTS, "num_experts": 4}),
    "Phi3ForCausalLM": ("phi3", {"sliding_window": WINDOW}),
    "Qwen2ForCausalLM": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "Qwen3ForCausalLM": ("qwen3", {"head_dim": 12}),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "head_dim": 8},
    ),
    "SmolLM3ForCausalLM": ("smollm3", {"no_rope_layers": [1, 0]}),
    "Starcoder2ForCausalLM": ("starcoder2", {"sliding_window": WINDOW}),
}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model folder and the same model in transformers' own hands."""

    path: Path
    info: ModelInfo
    reference: Any

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What `generate` appends to `prompt`."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = self.reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        return [int(token) for token in whole[0, len(prompt) :]]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """After the last of `tokens`; [vocabulary]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(input_ids=torch.tensor([tokens])).logits[0, -1].float()
        return logits


def make_tiny(
    path: Path, architecture: str = "LlamaForCausalLM", dtype: torch.dtype = torch.float32, **changes: Any
) -> Tiny:
    """Write a model of `architecture` to `path`; its weights depend on the architecture's name only. `changes` go into
    its configuration."""
    model_type, special = MODEL_TYPES[architecture]
    config = AutoConfig.for_model(model_type, **{**SIZES, **special, **changes})
    torch.manual_seed(sum(architecture.encode()))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-1.0, 1.0)
            if name.endswith("sinks"):
                parameter.uniform_(-1.0, 3.0)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    return Tiny(path, inspect_model(path), model)


def prompt_of(length: int, salt: int) -> list[int]:
    """`length` token ids that depend on nothing else but `salt`."""
    return [(salt * 31 + place * 7 + place * place * 3) % VOCABULARY for place in range(length)]
