"""Small tokenizers of the kinds that models come with, saved as model folders. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = (
    "The ferry leaves the northern bank at half past six.",
    "A doctor, two carts of apples, and a boy who has never seen the city.",
    "Größe, naïve café, Straße: Ünïcödé in ordinary words.",
    "数は 1, 2, 3; emoji 😀 😃 👩‍👩‍👧 🏳️‍🌈 are many bytes.",
    "def f(x):\n    return x + 1  # four spaces",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('tools are not known here') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ("<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def byte_level() -> Any:
    """Byte-level BPE: every token is bytes, so characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return with_special(tokenizer)


def byte_fallback() -> Any:
    """Sentencepiece style: ▁ for spaces, and byte tokens for characters that the vocabulary lacks."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], limit_alphabet=40, show_progress=False)
    trained.train_from_iterator(LINES, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_special(tokenizer)


def metaspace() -> Any:
    """Unigram with the Metaspace decoder, which drops the first token's leading space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return with_special(tokenizer)


def word_piece() -> Any:
    """WordPiece: continuations are marked, spaces are not."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return with_special(tokenizer)


KINDS = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace, "word piece": word_piece}


def with_special(tokenizer: Any) -> Any:
    """Special tokens, and an added one that is ordinary text."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return tokenizer


def save_folder(
    folder: Path, tokenizer: Any, *, chat_template: str | None = CHAT_TEMPLATE, eos: list[str] | None = None
) -> Path:
    """A model folder with everything that the gateway reads."""
    pretrained = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>")
    pretrained.chat_template = chat_template
    pretrained.save_pretrained(folder)
    ids = [tokenizer.token_to_id(token) for token in eos or ["<|end|>"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return folder
