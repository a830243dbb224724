from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoTokenizer

from gateway.errors import ApiError, TokenizerError
from gateway.tokenizer import load_tokenizer
from tests.gateway.folders import KINDS, LINES, byte_level, save_folder

TEXTS = (*LINES, "", " ", "  two  spaces  ", "<|user|>hi<|end|>", "<think>x", "2026", "tab\tnew\nline")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_auto_tokenizer(tmp_path: Path, kind: str) -> None:
    folder = save_folder(tmp_path / "model", KINDS[kind]())
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        for special in (True, False):
            expected = reference(text, add_special_tokens=special)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=special) == expected, text


def test_chats_are_rendered_as_by_auto_tokenizer(folder: Path) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert load_tokenizer(folder).render(messages) == expected


def test_truncation_and_padding_of_training_are_left_out(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = load_tokenizer(save_folder(tmp_path / "model", backend))
    assert len(tokenizer.encode("a b c d e f g h", add_special_tokens=False)) > 4
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_torch_is_never_imported(folder: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from gateway import Gateway, GatewayConfig\n"
        "async def main():\n"
        f"    gateway = Gateway(GatewayConfig(model_path={str(folder)!r}, token='t', port=0))\n"
        "    await gateway.start()\n"
        "    await gateway.stop(0)\n"
        "asyncio.run(main())\n"
        "from pathlib import Path\n"
        "from gateway.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(Path({str(folder)!r}))\n"
        "text = tokenizer.render([{'role': 'user', 'content': 'x'}])\n"
        "tokenizer.vocabulary.decode(tokenizer.encode(text, add_special_tokens=False))\n"
        "print([name for name in ('torch', 'ray', 'engine', 'connector') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 5}, {3}),
        ({"eos_token_id": [3, 4]}, None, {3, 4}),
        ({}, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": [6, 7]}, {6, 7}),
        ({"eos_token_id": None}, {"eos_token_id": None}, None),
        (None, None, None),
    ],
)
def test_which_tokens_end_an_answer(
    tmp_path: Path, generation: dict[str, Any] | None, model: dict[str, Any] | None, expected: set[int] | None
) -> None:
    backend = byte_level()
    folder = save_folder(tmp_path / "model", backend)
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    assert load_tokenizer(folder).eos_token_ids == (expected or {backend.token_to_id("<|end|>")})


def test_a_broken_tokenizer_names_its_folder(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", byte_level())
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=str(folder)):
        load_tokenizer(folder)


def test_a_broken_generation_config_names_its_file(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", byte_level())
    (folder / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"generation_config\.json is not valid JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].nothing.at_all }}", "{% if %}", "{{ 1 / 0 }}", "{{ messages[0]['content'] + 1 }}"]
)
def test_whatever_a_template_raises_is_about_the_request(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(save_folder(tmp_path / "model", byte_level(), chat_template=template))
    with pytest.raises(ApiError, match="chat template refuses these messages") as caught:
        tokenizer.render([{"role": "user", "content": "x"}])
    assert caught.value.status == 400


@pytest.mark.process
def test_a_gguf_file(tmp_path: Path) -> None:
    """Its tokenizer is that of the loader, and digits come one by one, which the loader misses."""
    backend = byte_level()
    write_gguf(tmp_path / "model.gguf", backend)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == {backend.token_to_id("<|end|>")}
    text = "The ferry leaves at 12345."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.vocabulary.decode(ids) == text
    digits = [backend.token_to_id(digit) for digit in "12345"]
    assert any(ids[start : start + 5] == digits for start in range(len(ids)))
    assert tokenizer.render([{"role": "user", "content": "x"}]) == "<|user|>x"


@pytest.mark.process
def test_a_folder_without_any_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def write_gguf(path: Path, backend: Any) -> None:
    """A file with a tokenizer and no weights to speak of."""
    model = json.loads(backend.to_str())["model"]
    size = backend.get_vocab_size()
    tokens = [backend.id_to_token(number) for number in range(size)]
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in special else 1 for number in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(backend.token_to_id("<s>"))
    writer.add_eos_token_id(backend.token_to_id("<|end|>"))
    writer.add_chat_template("{{ '<|user|>' + messages[0]['content'] }}")
    writer.add_tensor("token_embd.weight", np.zeros((size, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
