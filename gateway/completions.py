"""`/v1/completions`: a prompt as text or ids, and the shapes of its answers."""

from __future__ import annotations

from typing import Any

from gateway.endpoint import Answer, Asked, Names
from gateway.errors import bad_request
from gateway.fields import Fields, wrong
from gateway.parameters import read_parameters, read_token_ids
from gateway.supported import COMPLETION_FIELDS, COMPLETION_NOT_BUILT, refuse_unsupported
from gateway.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


class Completions:
    """See `gateway.endpoint.Endpoint`."""

    path = "/v1/completions"
    id_prefix = "cmpl-"
    prompt_field = "prompt"
    default_max_tokens = DEFAULT_MAX_TOKENS

    def read(self, fields: Fields) -> Asked:
        """Check and read a request."""
        refuse_unsupported(fields, COMPLETION_FIELDS, COMPLETION_NOT_BUILT)
        return Asked(
            prompt=_read_prompt(fields.required("prompt")), parameters=read_parameters(fields, ("max_tokens",))
        )

    def encode(self, tokenizer: Tokenizer, prompt: Any) -> list[int]:
        """The prompt's ids."""
        return tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)

    def whole(self, names: Names, answer: Answer) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        return _body(names, _choice(answer.text, answer.finish_reason))

    def opening(self, names: Names) -> list[dict[str, Any]]:
        """What a stream begins with: nothing."""
        return []

    def delta(self, names: Names, text: str) -> dict[str, Any]:
        """A piece of a stream."""
        return _body(names, _choice(text, None))

    def ending(self, names: Names, finish_reason: str) -> dict[str, Any]:
        """The end of a stream's text."""
        return _body(names, _choice("", finish_reason))

    def usage_only(self, names: Names) -> dict[str, Any]:
        """The chunk that carries a stream's usage."""
        return _body(names)


def _body(names: Names, *choices: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": names.answer_id,
        "object": "text_completion",
        "created": names.created,
        "model": names.model,
        "choices": list(choices),
    }


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _read_prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, "text or a non-empty list of token ids")
    if isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise bad_request(
                f"prompt must be one prompt, got a list of {len(value)}; several prompts are not supported yet",
                "prompt",
                "unsupported_parameter",
            )
        return value[0] if isinstance(value[0], str) else read_token_ids("prompt[0]", value[0])
    return read_token_ids("prompt", value)
