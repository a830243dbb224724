"""Writes the tokenizer of a model folder without a tokenizer.json: `python -m gateway.export_tokenizer FOLDER TARGET`.

A program of its own, so that the torch that transformers imports on this way never enters the gateway.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer


def export_tokenizer(folder: Path, target: Path) -> None:
    """Load the tokenizer in `folder`, from its GGUF file if there is one, and save it to `target`.

    Raises:
        ValueError, OSError: saying what the folder lacks.
    """
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{len(files)} .gguf files in one folder; keep one of {[file.name for file in files]}")
    if not files:
        AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(target)
        return
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=files[0].name, local_files_only=True)
    _correct_pre_tokenizer(tokenizer.backend_tokenizer, files[0])
    tokenizer.save_pretrained(target)


def _correct_pre_tokenizer(backend: Any, file: Path) -> None:
    """The loader takes plain byte level for the "smollm" kind, which also splits numbers into digits."""
    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


if __name__ == "__main__":
    export_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))
