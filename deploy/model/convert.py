"""Turns a GGUF file into an ordinary Hugging Face folder: `python -m deploy.model.convert GGUF FOLDER STOP_TOKEN…`.

A program of its own, so that the gigabyte that this takes goes back to the system. Two things are put right on the way:

- The weights are unpacked, and the model forgets that they ever were quantised; else it could not be saved.
- The GGUF names its pre-tokeniser ("smollm": single digits, then byte level), which the loader does not know; it takes
  plain byte level, and runs of digits would tokenise otherwise than in training.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, folder: Path, stop_tokens: list[str]) -> None:
    """Write `folder` (existing, empty): configuration, bfloat16 safetensors, tokenizer with its chat template."""
    print("reading the weights", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    set_pre_tokenizer(tokenizer.backend_tokenizer)

    print("writing the folder", flush=True)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config._from_model_config = False
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token) for token in stop_tokens]
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    check(folder)


def set_pre_tokenizer(tokenizer: Tokenizer) -> None:
    """Digits one by one, then byte level."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def check(folder: Path) -> None:
    """Refuse a result that is not what it should be.

    Raises:
        ValueError: naming what is wrong.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise ValueError("the converted model still claims to be quantised")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError("the converted tokenizer has no chat template")
    ids = tokenizer("2026", add_special_tokens=False)["input_ids"]
    if len(ids) != 4:
        raise ValueError(f"the converted tokenizer reads 2026 as {len(ids)} tokens instead of four digits")


def main(arguments: list[str]) -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("stop_tokens", nargs="+")
    options = parser.parse_args(arguments)
    convert(options.gguf, options.folder, options.stop_tokens)


if __name__ == "__main__":
    main(sys.argv[1:])
