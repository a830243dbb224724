"""A transformers model on top of our attention.

The library builds the modules and loads the weights; the attention of every layer goes to `engine.attention`, found by
the name that it is registered under. No mask function is registered under that name, so the library builds no masks.

The library fills in what a configuration is silent about, and random numbers for weights that are not there; what came
of it is compared with what `inspect_model` found before anything is computed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.attention import ATTENTION
from engine.errors import ModelError
from engine.families import complete, refusal
from engine.latent import absorb
from engine.model_info import ModelInfo, read_sizes

logger = logging.getLogger(__name__)


def load_model(info: ModelInfo, dtype: torch.dtype) -> Any:
    """The model, in evaluation mode, with its weights in `dtype`.

    Raises:
        ModelError: the library cannot load it, lacks weights for it, or reads its configuration otherwise than we do.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": ATTENTION,
        "local_files_only": True,
        "output_loading_info": True,
    }
    if info.gguf_file is not None:
        options["gguf_file"] = info.gguf_file
    try:
        model, report = AutoModelForCausalLM.from_pretrained(info.path, **options)
    except Exception as error:  # it raises whatever its parts do
        raise ModelError(f"model {info.path} could not be loaded: {error!r}") from error
    if report["missing_keys"]:
        raise ModelError(f"the weights of {info.path} are incomplete: {_some(report['missing_keys'])} missing")
    if report["unexpected_keys"]:
        logger.warning(
            "the weights of %s hold what the model does not use: %s", info.path, _some(report["unexpected_keys"])
        )
    _check(info, {**model.config.to_dict(), "architectures": [type(model).__name__]})
    # The GGUF loader dequantises, but leaves parameters in the type that the file had.
    model = model.to(dtype).eval().requires_grad_(False)
    _require_numbers(info, model)
    absorb(model)
    return model


def _require_numbers(info: ModelInfo, model: Any) -> None:
    """A damaged file can hold anything; every answer would be nonsense, or fail."""
    for name, parameter in model.named_parameters():
        low, high = torch.aminmax(parameter)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            count = int((~torch.isfinite(parameter)).sum())
            raise ModelError(
                f"the weights of {info.path} are damaged: {name} has {count} of {parameter.numel()} elements that are "
                "not finite numbers; fetch the model again"
            )


def _check(info: ModelInfo, config: dict[str, Any]) -> None:
    if info.gguf_file is not None:
        config.pop("quantization_config", None)  # of what has been dequantised
    config = complete(config)
    reason = refusal(config)
    if reason is not None:
        raise ModelError(f"model {info.path} cannot be served: {reason}")
    sizes = {"architecture": config["architectures"][0], **read_sizes(config)}
    different = [
        f"{name} {getattr(info, name)} and {size}" for name, size in sizes.items() if getattr(info, name) != size
    ]
    if different:
        raise ModelError(f"model {info.path} is not what its folder says: {', '.join(different)}")


def _some(names: Collection[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(sorted(names)[:limit]) + more
