"""A model run over a pool of KV pages: what is asked, what is answered, and the pages for whoever moves them."""

from typing import TYPE_CHECKING, Any

from engine.blocks import BlockTable
from engine.config import EngineConfig
from engine.errors import BlockError, EngineClosed, EngineError, ModelError, RequestTooLong
from engine.model_info import ModelInfo, inspect_model
from engine.request import EngineRequest, Failed, FinishReason, Output, SamplingParams, Token

if TYPE_CHECKING:
    from engine.engine import Engine, EngineStats, Memory

__all__ = [
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
    "Memory",
    "ModelError",
    "ModelInfo",
    "Output",
    "RequestTooLong",
    "SamplingParams",
    "Token",
    "inspect_model",
]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: settings and model folders are looked at without it."""
    if name not in {"Engine", "EngineStats", "Memory"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine import engine as module

    return getattr(module, name)
