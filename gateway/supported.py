"""Which fields a request may have.

Three kinds: fields that are read; fields of the API that are accepted as long as they ask for nothing that is not built
(their harmless values are listed here); and everything else, which is refused by name: an ignored misspelling would
silently give another answer than was asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from gateway.errors import bad_request
from gateway.fields import Fields, shown

COMMON_FIELDS = frozenset(
    {
        "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
        "repetition_penalty", "frequency_penalty", "presence_penalty", "n", "stream", "stream_options",
        "return_token_ids",
    }
)  # fmt: skip

# Said about the sender, not to the model: checked, and not used.
UNUSED_TEXTS = ("user", "safety_identifier", "prompt_cache_key")
UNUSED_FIELDS = frozenset({*UNUSED_TEXTS, "metadata"})

# For each field of the API that is not built: its values that change nothing. null is always one of them.
COMMON_NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}

COMPLETION_FIELDS = COMMON_FIELDS | {"prompt"}
COMPLETION_NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    **COMMON_NOT_BUILT,
    "logprobs": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}

CHAT_FIELDS = COMMON_FIELDS | {"messages", "max_completion_tokens"}
CHAT_NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    **COMMON_NOT_BUILT,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def refuse_unsupported(fields: Fields, read: frozenset[str], not_built: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that nobody knows, requests for what is not built, and wrong values where nobody else looks.

    Raises:
        ApiError: 400, naming the field.
    """
    for name, value in fields.values.items():
        if name in read or name in UNUSED_FIELDS:
            continue
        param = fields.param(name)
        if name not in not_built:
            close = difflib.get_close_matches(name, sorted(read), n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise bad_request(f"unrecognized request argument {name[:80]!r}{meant}", param[:80], "unknown_parameter")
        harmless = not_built[name]
        if value is not None and not any(_same(value, option) for option in harmless):
            listed = ", ".join(shown(option) for option in (*harmless, None))
            raise bad_request(
                f"{param} is not supported yet; leave it out or set it to {listed}, got {shown(value)}",
                param,
                "unsupported_parameter",
            )
    for name in UNUSED_TEXTS:
        fields.text(name)
    metadata = fields.object("metadata")
    if metadata is not None:
        for name in metadata.values:
            metadata.text(name)


def _same(value: object, option: object) -> bool:
    # In Python True == 1 and False == 0; in JSON they are different values.
    return type(value) is type(option) and value == option
