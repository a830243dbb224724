"""`/v1/chat/completions`: messages, and the shapes of its answers."""

from __future__ import annotations

from typing import Any

from gateway.endpoint import Answer, Asked, Names
from gateway.errors import bad_request
from gateway.fields import Fields, wrong
from gateway.parameters import read_parameters
from gateway.supported import CHAT_FIELDS, CHAT_NOT_BUILT, refuse_unsupported
from gateway.tokenizer import Tokenizer

# Chat templates know no developer: it is the newer name of the system role.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_call_id"})


class Chat:
    """See `gateway.endpoint.Endpoint`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    prompt_field = "messages"
    default_max_tokens = None

    def read(self, fields: Fields) -> Asked:
        """Check and read a request."""
        refuse_unsupported(fields, CHAT_FIELDS, CHAT_NOT_BUILT)
        messages = fields.required("messages")
        if not isinstance(messages, list) or not messages:
            raise fields.wrong("messages", "a non-empty list of messages")
        return Asked(
            prompt=[_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
            parameters=read_parameters(fields, ("max_tokens", "max_completion_tokens")),
        )

    def encode(self, tokenizer: Tokenizer, prompt: Any) -> list[int]:
        """The ids of what the chat template makes of the messages; the template writes the special tokens itself."""
        return tokenizer.encode(tokenizer.render(prompt), add_special_tokens=False)

    def whole(self, names: Names, answer: Answer) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return _body(names, "chat.completion", _choice({"message": message}, answer.finish_reason))

    def opening(self, names: Names) -> list[dict[str, Any]]:
        """What a stream begins with: who speaks."""
        return [_chunk(names, {"role": "assistant", "content": ""}, None)]

    def delta(self, names: Names, text: str) -> dict[str, Any]:
        """A piece of a stream."""
        return _chunk(names, {"content": text}, None)

    def ending(self, names: Names, finish_reason: str) -> dict[str, Any]:
        """The end of a stream's text."""
        return _chunk(names, {}, finish_reason)

    def usage_only(self, names: Names) -> dict[str, Any]:
        """The chunk that carries a stream's usage."""
        return _body(names, "chat.completion.chunk")


def _body(names: Names, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": names.answer_id,
        "object": kind,
        "created": names.created,
        "model": names.model,
        "choices": list(choices),
    }


def _chunk(names: Names, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return _body(names, "chat.completion.chunk", _choice({"delta": delta}, finish_reason))


def _choice(said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}


def _read_message(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong(path, value, "an object with role and content")
    fields = Fields(value, path)
    role = fields.required("role")
    if not isinstance(role, str) or role not in ROLES:
        raise fields.wrong("role", f"one of {', '.join(ROLES)}")
    for name, said in value.items():
        # Clients send back the messages that they were given, with the fields that were empty in them.
        if name not in MESSAGE_FIELDS and said not in (None, [], {}, ""):
            raise bad_request(
                f"{fields.param(name)} is not supported yet; leave it out", fields.param(name), "unsupported_parameter"
            )
    message = {"role": ROLES[role], "content": _read_content(fields)}
    for name in ("name", "tool_call_id"):
        if (text := fields.text(name)) is not None:
            message[name] = text
    return message


def _read_content(fields: Fields) -> str:
    content = fields.required("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise fields.wrong("content", "text or a non-empty list of text parts")
    return "\n".join(_read_part(part, f"{fields.param('content')}[{index}]") for index, part in enumerate(content))


def _read_part(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        raise wrong(path, value, "an object with type and text")
    fields = Fields(value, path)
    if fields.required("type") != "text":
        raise bad_request(
            f'{fields.param("type")} must be "text"; other kinds of content are not supported',
            fields.param("type"),
            "unsupported_parameter",
        )
    text = fields.required("text")
    if not isinstance(text, str):
        raise fields.wrong("text", "text")
    return text
