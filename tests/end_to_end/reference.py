"""What the answers have to be: transformers' own greedy `generate`, in float32."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.prompts import LENGTHS, prose


def prompts_of_exact_length(model: Path) -> list[list[int]]:
    """One prompt for each of `LENGTHS`, each starting at another place of the text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids: list[int] = tokenizer(prose(200))["input_ids"]
    assert len(ids) > max(LENGTHS) + 40 * len(LENGTHS)
    return [ids[40 * index : 40 * index + length] for index, length in enumerate(LENGTHS)]


def greedy(model: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The tokens that `generate` adds to each prompt, stop token included."""
    torch.set_num_threads(2)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers: list[list[int]] = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
            answers.append(output[0, len(prompt) :].tolist())
    return answers
