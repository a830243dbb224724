"""Everything the engine raises.

EngineError
├── ModelError        a model folder that cannot be served, and why
├── RequestTooLong    prompt plus output can never fit
├── EngineClosed      the engine takes no requests (any more); carries the cause
├── LoadFailed        pages that a step waited for did not arrive
├── PromptRefused     one of several prompts can never run; nothing has been computed
├── GenerationFailed  some of several prompts ended without finishing; carries what became of all
└── BlockError        blocks were freed or used by somebody who does not own them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.llm import Generation


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


class PromptRefused(EngineError):
    """Prompt `index` (from 0) of a call can never run; nothing of the call has been computed."""

    def __init__(self, index: int, count: int, reason: str) -> None:
        super().__init__(f"prompt {index} of {count} (counted from 0) is refused: {reason}")
        self.index = index


class GenerationFailed(EngineError):
    """Prompts ended without finishing. `failures` says why, by index; `generations` are all of the call's, in order:
    those of `failures` have a finish of None, and the tokens drawn before.
    """

    def __init__(self, failures: Mapping[int, str], generations: Sequence[Generation]) -> None:
        index, message = min(failures.items())
        super().__init__(
            f"{len(failures)} of {len(generations)} prompts ended without finishing; prompt {index} (counted from 0): "
            f"{message}"
        )
        self.failures = dict(failures)
        self.generations = list(generations)


class BlockError(EngineError):
    """Blocks were freed or used by somebody who does not own them."""
