"""Which models prefill and decode workers can share: those whose layers all see the whole context."""

from __future__ import annotations

from engine import EngineConfig, EngineError, ModelError, ModelInfo


def require_transferable(info: ModelInfo, config: EngineConfig) -> None:
    """Refuse what cannot be handed over from one worker to another yet.

    Raises:
        ModelError: layers of the model have a window.
        EngineError: a draft model has pages of its own beside the model's.
    """
    require_whole_context(info)
    if config.speculation == "draft_model":
        raise EngineError(
            "engine.speculation is 'draft_model', whose pages are not handed over; use 'prompt_lookup' or 'none'"
        )


def require_whole_context(info: ModelInfo) -> None:
    """Refuse a model for what its folder says.

    Raises:
        ModelError: layers of the model have a window.
    """
    windows = sorted({layer.attention.window for layer in info.layers if layer.attention is not None})
    if windows != [0]:
        raise ModelError(
            f"model {info.path} cannot be served by separate workers: it has layers with windows of "
            f"{', '.join(map(str, windows))} tokens (0: none), and only pages of layers without one are handed over; "
            "engine.LLM runs it in one process"
        )
