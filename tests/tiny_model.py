"""A random Llama, small enough to load in a blink and with weights large enough that its logits are far apart."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 128


def save_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write it to `folder` as a Hugging Face folder in float32, with a tokenizer of one token per byte."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    words = {f"t{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t3", eos_token="t2", bos_token="t1").save_pretrained(
        folder
    )
    return folder


def greedy(folder: Path, prompt: list[int], max_tokens: int, stop: int = 2) -> list[int]:
    """What transformers' own greedy `generate` adds to `prompt`, stop token included."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=0,
        )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer
