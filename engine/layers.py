"""What each layer of a model keeps of a sequence: keys and values of tokens, a recurrent state, or both."""

from __future__ import annotations

from typing import Literal

import msgspec


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """What an attention layer caches. Sizes are per rank.

    `window` is in tokens, for the kinds that have one: a query of a `window` layer sees that many keys, its own
    included; one of a `chunked` layer those since the last multiple of it. A `latent` layer caches one row per token,
    `key_dim` wide, for all heads; its `value_dim` is 0.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    kind: Literal["full", "window", "chunked", "latent"] = "full"
    window: int = 0

    def __post_init__(self) -> None:
        if (self.window > 0) != (self.kind in ("window", "chunked")):
            raise ValueError(f"a layer of kind {self.kind} with a window of {self.window} tokens")
        if min(self.num_kv_heads, self.key_dim) < 1 or self.value_dim < (0 if self.kind == "latent" else 1):
            raise ValueError(f"{self.num_kv_heads} heads of {self.key_dim} and {self.value_dim} elements")


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder layer; a layer may have both (heads of attention beside a recurrent mixer), or neither."""

    attention: Attention | None = None
    recurrent: bool = False
