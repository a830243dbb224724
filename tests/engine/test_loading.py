"""A model is loaded whole and as it was inspected, or not at all."""

from __future__ import annotations

import gc
import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, ModelError, inspect_model
from engine.loading import load_model
from tests.engine.driver import PATIENCE_S, running, submit
from tests.engine.tiny import SIZES, VOCABULARY, Tiny, prompt_of

QUANTISED = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def folder(llama: Tiny, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(llama.path, tmp_path / "model"))


def change_weights(folder: Path, without: str, more: dict[str, torch.Tensor]) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if name != without}
    save_file({**kept, **more}, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_are_missing(folder: Path) -> None:
    change_weights(folder, "model.layers.1.mlp.up_proj.weight", {})
    with pytest.raises(ModelError, match=r"incomplete: model.layers.1.mlp.up_proj.weight missing$"):
        load_model(inspect_model(folder), torch.float32)


def test_weights_of_another_shape(folder: Path) -> None:
    change_weights(folder, "model.norm.weight", {"model.norm.weight": torch.ones(7)})
    with pytest.raises(ModelError, match="could not be loaded"):
        load_model(inspect_model(folder), torch.float32)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_numbers(folder: Path, value: float) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    weight = torch.ones(48, 32)
    weight[3, 5] = weight[47, 31] = value
    change_weights(folder, name, {name: weight})
    with pytest.raises(ModelError, match=rf"{name} has 2 of 1536 elements that are not finite numbers"):
        load_model(inspect_model(folder), torch.float32)


def test_weights_that_nobody_uses_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_weights(folder, "", {"model.extra.weight": torch.ones(3)})
    load_model(inspect_model(folder), torch.float32)
    assert "hold what the model does not use: model.extra.weight" in caplog.text


def test_a_folder_that_is_not_what_was_inspected(llama: Tiny) -> None:
    other = msgspec.structs.replace(llama.info, layers=llama.info.layers[:1], vocab_size=5)
    with pytest.raises(ModelError, match=r"is not what its folder says: layers \(Layer.*, vocab_size 5 and 199"):
        load_model(other, torch.float32)


def test_a_configuration_that_changed_since_it_was_inspected(folder: Path) -> None:
    info = inspect_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="rotary embedding is of type dynamic"):
        load_model(info, torch.float32)


def test_a_model_that_cannot_be_loaded_leaves_no_pool(folder: Path) -> None:
    change_weights(folder, "model.norm.weight", {})
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ModelError):
        Engine(inspect_model(folder), EngineConfig(dtype="float32", kv_cache_bytes=1 << 20))
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def write_gguf(file: Path) -> None:
    """A llama with random weights, quantised as such files are, and what a tokenizer needs."""
    hidden, inner, heads, kv_heads = SIZES["hidden_size"], 64, 4, 2
    chance = np.random.default_rng(5)
    writer = gguf.GGUFWriter(file, "llama")
    for name, size in {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "rope.dimension_count": hidden // heads,
        "vocab_size": VOCABULARY,
    }.items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_token_list([f"t{number}" for number in range(VOCABULARY)])

    def add(name: str, *shape: int) -> None:
        weight = chance.normal(0.0, 0.4, shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(weight, QUANTISED), raw_dtype=QUANTISED)

    add("token_embd.weight", VOCABULARY, hidden)
    add("output.weight", VOCABULARY, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
    for layer in range(2):
        add(f"blk.{layer}.attn_q.weight", hidden, hidden)
        add(f"blk.{layer}.attn_k.weight", hidden * kv_heads // heads, hidden)
        add(f"blk.{layer}.attn_v.weight", hidden * kv_heads // heads, hidden)
        add(f"blk.{layer}.attn_output.weight", hidden, hidden)
        add(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        add(f"blk.{layer}.ffn_up.weight", inner, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, inner)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_equals_generate(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    info = inspect_model(tmp_path)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    tiny = Tiny(tmp_path, info, reference)
    prompts = [prompt_of(length, salt) for salt, length in enumerate((2, 19))]
    with running(tiny, max_num_batched_tokens=8) as engine:
        heard = [submit(engine, str(number), prompt, 10) for number, prompt in enumerate(prompts)]
        assert [one.tokens() for one in heard] == [tiny.greedy(prompt, 10) for prompt in prompts]


def test_a_gguf_file_in_bfloat16(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    engine = Engine(inspect_model(tmp_path), EngineConfig(kv_cache_bytes=1 << 20))
    engine.start()
    try:
        assert len(submit(engine, "one", prompt_of(9, 1), 6).tokens()) == 6
    finally:
        engine.close(PATIENCE_S)
