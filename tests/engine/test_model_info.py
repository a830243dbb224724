"""What is found out about a model folder, and what is refused, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoConfig

from engine import ModelError, inspect_model
from engine.families import FAMILIES, complete, describe
from engine.layers import Attention
from tests.engine.tiny import MODEL_TYPES, SIZES, VOCABULARY, Tiny


@pytest.fixture
def folder(llama: Tiny, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(llama.path, tmp_path / "model"))


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def test_sizes(llama: Tiny) -> None:
    info = llama.info
    assert (info.architecture, info.num_layers) == ("LlamaForCausalLM", 2)
    assert {layer.attention for layer in info.layers} == {Attention(num_kv_heads=2, key_dim=8, value_dim=8)}
    assert (info.vocab_size, info.max_position_embeddings, info.gguf_file) == (VOCABULARY, 256, None)


def test_sizes_that_are_not_written_down_follow_from_others(folder: Path) -> None:
    configure(folder, head_dim=..., num_key_value_heads=...)
    info = inspect_model(folder)
    assert {layer.attention for layer in info.layers} == {Attention(num_kv_heads=4, key_dim=8, value_dim=8)}


def test_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere does not exist; --model takes a local"):
        inspect_model(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file, not a folder"):
        inspect_model(tmp_path / "file")
    with pytest.raises(ModelError, match=r"neither a config.json nor a .gguf file"):
        inspect_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are Cohere2.*SmolLM3"),
        ({"architectures": None}, r"\(none named\) is not supported"),
        ({"architectures": []}, r"\(none named\) is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\); use unquantised"),
        ({"quantization_config": "awq"}, "quantised"),
        ({"sliding_window": 128}, "sliding window of 128 tokens"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of types chunked_attention"),
        ({"layer_types": 3}, "is not a model configuration"),
        ({"architectures": ["JambaForCausalLM"]}, "JambaForCausalLM is not supported .the library's recurrent layers"),
        ({"quantization_config": {"quant_method": "gptq"}, "architectures": "LlamaForCausalLM"}, "L is not supported"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rotary embedding is of type longrope; supported are default, ",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary embedding is of type dynamic"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "su"}}, "rotary embedding is of type su"),
        ({"rope_scaling": [1]}, "says nothing about a rotary embedding"),
        ({"num_hidden_layers": ...}, "lacks or garbles a size: KeyError.*num_hidden_layers"),
        ({"num_attention_heads": "many"}, "lacks or garbles a size"),
        ({"num_attention_heads": 0, "head_dim": None}, "lacks or garbles a size"),
        ({"num_hidden_layers": 0}, "lacks or garbles a size"),
        ({"vocab_size": -1}, "lacks or garbles a size"),
        ({"max_position_embeddings": None}, "lacks or garbles a size"),
    ],
)
def test_configurations_that_cannot_be_served(folder: Path, changes: dict[str, Any], message: str) -> None:
    configure(folder, **changes)
    with pytest.raises(ModelError, match=message):
        inspect_model(folder)


def test_a_window_that_is_switched_off_is_fine(folder: Path) -> None:
    configure(folder, sliding_window=128, use_sliding_window=False)
    assert inspect_model(folder).num_layers == 2


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_where_a_configuration_is_silent_the_library_decides(architecture: str, folder: Path) -> None:
    model_type, _ = MODEL_TYPES[architecture]
    sizes = {"vocab_size": 199, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 12}
    written = {"model_type": model_type, "architectures": [architecture], **sizes}
    (folder / "config.json").write_text(json.dumps(written))
    library = {**AutoConfig.from_pretrained(folder).to_dict(), "architectures": [architecture]}
    assert describe(complete(written)) == describe(complete(library))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", b"\xff\xfe"])
def test_damaged_configurations(folder: Path, text: str | bytes) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=r"config.json (cannot be read|is not a model configuration)"):
        inspect_model(folder)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"incomplete: it has no tokenizer \(tokenizer.json, "):
        inspect_model(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"incomplete: model.safetensors missing$"):
        inspect_model(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"missing; convert pytorch_model.bin to safetensors"):
        inspect_model(folder)


def test_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"incomplete: model-00002-of-00002.safetensors missing"):
        inspect_model(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    assert inspect_model(folder).num_layers == 2


@pytest.mark.parametrize("index", [{}, [], {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 3}}])
def test_damaged_indexes(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no weight_map|has an empty weight_map|incomplete: 3 missing"):
        inspect_model(folder)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -4000])
def test_truncated_weights(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model.safetensors is damaged"):
        inspect_model(folder)


@pytest.mark.parametrize("header", [b"{}", b"[]", b"{", b'{"a": {}}', b'{"a": {"data_offsets": [0, "x"]}}'])
def test_weights_without_a_sound_header(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model.safetensors is damaged"):
        inspect_model(folder)


def test_the_fingerprint_tells_models_apart(llama: Tiny, folder: Path) -> None:
    assert inspect_model(folder).fingerprint == llama.info.fingerprint
    file = folder / "model.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    changed = inspect_model(folder).fingerprint
    assert changed != llama.info.fingerprint
    configure(folder, rope_theta=77.0)
    assert inspect_model(folder).fingerprint not in (changed, llama.info.fingerprint)


def write_gguf(file: Path, kind: str = "llama", tensor: str = "token_embd.weight", **changes: Any) -> None:
    """A GGUF file with a llama's sizes and no weights to speak of."""
    writer = gguf.GGUFWriter(file, kind)
    sizes = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": SIZES["hidden_size"],
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        **changes,
    }
    for name, value in sizes.items():
        if isinstance(value, str):
            writer.add_string(f"{kind}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{kind}.{name}", value)
    writer.add_token_list([f"t{number}" for number in range(VOCABULARY)])
    writer.add_tensor(tensor, np.zeros((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    info = inspect_model(tmp_path)
    assert (info.architecture, info.gguf_file, info.vocab_size) == ("LlamaForCausalLM", "model.gguf", VOCABULARY)
    assert (info.num_layers, info.max_position_embeddings) == (2, 256)
    assert {layer.attention for layer in info.layers} == {Attention(num_kv_heads=2, key_dim=8, value_dim=8)}
    (tmp_path / "config.json").write_text("{}")  # some repositories have one beside it
    assert inspect_model(tmp_path) == info


def test_gguf_that_cannot_be_served(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "mamba")
    with pytest.raises(ModelError, match="GGUF architecture 'mamba', which cannot be served; supported are llama"):
        inspect_model(tmp_path)
    write_gguf(tmp_path / "model.gguf", **{"rope.scaling.type": "yarn"})
    with pytest.raises(ModelError, match="scales its rotary embedding, which is lost in loading; use a safetensors"):
        inspect_model(tmp_path)
    write_gguf(tmp_path / "model.gguf", tensor="rope_freqs.weight")
    with pytest.raises(ModelError, match="scales its rotary embedding"):
        inspect_model(tmp_path)
    write_gguf(tmp_path / "model.gguf", expert_count=8)
    with pytest.raises(ModelError, match="mixture of experts"):
        inspect_model(tmp_path)
    write_gguf(tmp_path / "model.gguf", block_count=None)
    with pytest.raises(ModelError, match="lacks or garbles a size"):
        inspect_model(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        inspect_model(tmp_path)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"has 2 .gguf files; keep one"):
        inspect_model(tmp_path)
