"""A model run over a pool of KV pages: what is asked, what is answered, and the pages for whoever moves them."""

import importlib
from typing import TYPE_CHECKING, Any

from engine.blocks import BlockTable
from engine.config import EngineConfig
from engine.errors import (
    BlockError,
    EngineClosed,
    EngineError,
    GenerationFailed,
    ModelError,
    PromptRefused,
    RequestTooLong,
)
from engine.model_info import ModelInfo, inspect_model
from engine.request import EngineRequest, Failed, FinishReason, Output, SamplingParams, Token

if TYPE_CHECKING:
    from engine.engine import Engine, EngineStats, Memory
    from engine.llm import LLM, Generation

__all__ = [
    "LLM",
    "BlockError",
    "BlockTable",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "EngineRequest",
    "EngineStats",
    "Failed",
    "FinishReason",
    "Generation",
    "GenerationFailed",
    "Memory",
    "ModelError",
    "ModelInfo",
    "Output",
    "PromptRefused",
    "RequestTooLong",
    "SamplingParams",
    "Token",
    "inspect_model",
]


_NEEDS_TORCH = {
    "Engine": "engine.engine",
    "EngineStats": "engine.engine",
    "Generation": "engine.llm",
    "LLM": "engine.llm",
    "Memory": "engine.engine",
}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: settings and model folders are looked at without it."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
