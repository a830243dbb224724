"""A model folder's tokenizer, without torch.

transformers' `AutoTokenizer` imports torch, which the gateway must not pay for (seconds of start-up, hundreds of
megabytes per process), so `tokenizer.json` is loaded through transformers' tokenizer class proper; it is what
`AutoTokenizer` reads as well. Folders that have no such file (GGUF, sentencepiece) are exported once at start by a
child process, where `AutoTokenizer` may import what it likes: see `export_tokenizer`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from gateway.detokenize import Vocabulary
from gateway.errors import TokenizerError, bad_request

EXPORT_TIMEOUT_S = 120.0


class Tokenizer:
    """Text into ids, messages into text, ids into text (by `vocabulary`). Methods may be called from any thread."""

    def __init__(self, pretrained: Any, eos_token_ids: frozenset[int]) -> None:
        self._pretrained = pretrained
        self._backend = pretrained.backend_tokenizer
        # What a tokenizer.json may prescribe for training has no place in serving.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocabulary = Vocabulary(self._backend)
        self.eos_token_ids = eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of `text`; special tokens written out in it are taken for what they say."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt that the model's chat template makes of `messages`, up to where the assistant begins to speak.

        Raises:
            ApiError: 400, when the model has no chat template or its template refuses the messages.
        """
        try:
            template = self._pretrained.get_chat_template()
        except ValueError:
            raise bad_request(
                "this model has no chat template; use /v1/completions with a prompt", "messages", "no_chat_template"
            ) from None
        try:
            text: str = self._pretrained.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        # A template is a program that came with the model; whatever it raises, it raises about these messages.
        except Exception as error:
            raise bad_request(f"the model's chat template refuses these messages: {error}", "messages") from None
        return text


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a local model folder; blocks, and never looks at a hub.

    Raises:
        TokenizerError: naming the folder and what is wrong with it.
    """
    if not folder.is_dir():
        raise TokenizerError(f"model folder {folder} does not exist")
    if (folder / "tokenizer.json").is_file():
        return Tokenizer(pretrained := _load(folder), _eos_token_ids(folder, pretrained))
    with tempfile.TemporaryDirectory(prefix="kvferry-tokenizer-") as exported:
        _export(folder, Path(exported))
        return Tokenizer(pretrained := _load(Path(exported)), _eos_token_ids(folder, pretrained))


def _load(folder: Path) -> Any:
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    # The tokenizers library raises bare `Exception`s about malformed files.
    except Exception as error:
        raise TokenizerError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def _export(folder: Path, target: Path) -> None:
    command = [sys.executable, "-m", "gateway.export_tokenizer", str(folder), str(target)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=EXPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise TokenizerError(f"exporting the tokenizer of {folder} took longer than {EXPORT_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TokenizerError(f"the tokenizer of {folder} cannot be loaded: {last_line}")


def _eos_token_ids(folder: Path, pretrained: Any) -> frozenset[int]:
    """The ids that end an answer, by the rule of transformers' `generate`: what the generation config says, else the
    model's configuration, else the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        try:
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        except ValueError as error:
            raise TokenizerError(f"{file} is not valid JSON: {error}") from error
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset() if pretrained.eos_token_id is None else frozenset([pretrained.eos_token_id])
