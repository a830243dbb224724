"""A transformers model on top of our attention.

The library builds the modules and loads the weights; the attention of every layer goes to `engine.attention`, found by
the name that it is registered under. No mask function is registered under that name, so the library builds no masks.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.attention import ATTENTION
from engine.errors import ModelError
from engine.model_info import ModelInfo


def load_model(info: ModelInfo, dtype: torch.dtype) -> Any:
    """The model, in evaluation mode, with its weights in `dtype`.

    Raises:
        ModelError: the library cannot load it.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION, "local_files_only": True}
    if info.gguf_file is not None:
        options["gguf_file"] = info.gguf_file
    try:
        model = AutoModelForCausalLM.from_pretrained(info.path, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"model {info.path} could not be loaded: {error}") from error
    # The GGUF loader dequantises, but leaves parameters in the type that the file had.
    return model.to(dtype).eval().requires_grad_(False)
