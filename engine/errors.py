"""Everything the engine raises.

EngineError
├── ModelError        a model folder that cannot be served, and why
├── RequestTooLong    prompt plus output can never fit
├── EngineClosed      the engine takes no requests (any more); carries the cause
├── LoadFailed        pages that a step waited for did not arrive
└── BlockError        blocks were freed or used by somebody who does not own them
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything this package raises on purpose."""


class ModelError(EngineError):
    """A model folder that cannot be served."""


class RequestTooLong(EngineError):
    """Prompt plus output can never fit. Both lengths are in tokens."""

    def __init__(self, prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"{prompt_tokens} prompt tokens and {max_tokens} output tokens do not fit: at most {max_model_len} tokens "
            "can be held; shorten the prompt or ask for fewer tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class EngineClosed(EngineError):
    """The engine takes no requests."""


class LoadFailed(EngineError):
    """Pages that a step waited for did not arrive."""


class BlockError(EngineError):
    """Blocks were freed or used by somebody who does not own them."""
