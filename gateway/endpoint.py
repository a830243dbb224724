"""The seam between the two text endpoints and what they share: what a request asks, and the shapes of answers."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from gateway.fields import Fields
from gateway.parameters import Parameters
from gateway.tokenizer import Tokenizer


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has been read. `prompt` is the endpoint's own: text, ids or messages."""

    prompt: Any
    parameters: Parameters


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """What every part of one answer carries. `created` is in Unix seconds."""

    answer_id: str
    created: int
    model: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    text: str
    finish_reason: str


class Endpoint(Protocol):
    """One of `Completions` and `Chat`. `default_max_tokens` None is whatever the context has left."""

    @property
    def path(self) -> str:
        """Where it is."""

    @property
    def id_prefix(self) -> str:
        """What its answers' ids begin with."""

    @property
    def prompt_field(self) -> str:
        """The field that its prompt comes from."""

    @property
    def default_max_tokens(self) -> int | None:
        """See the class."""

    def read(self, fields: Fields) -> Asked:
        """Check and read a request. Raises `ApiError` 400, naming the field."""

    def encode(self, tokenizer: Tokenizer, prompt: Any) -> list[int]:
        """The prompt's ids; runs in a thread."""

    def whole(self, names: Names, answer: Answer) -> dict[str, Any]:
        """The answer to a request that does not stream."""

    def opening(self, names: Names) -> list[dict[str, Any]]:
        """What a stream begins with."""

    def delta(self, names: Names, text: str) -> dict[str, Any]:
        """A piece of a stream."""

    def ending(self, names: Names, finish_reason: str) -> dict[str, Any]:
        """The end of a stream's text."""

    def usage_only(self, names: Names) -> dict[str, Any]:
        """The chunk that carries a stream's usage."""
