"""How families of attention-only models say what their layers are.

There are four ways: every layer sees everything; so does every layer, through one latent row for all heads; every layer
has the one window that the configuration names, if it names one; or a list (`layer_types`) tells layers with the window
from layers without. Where that list is absent the library derives it by a rule of the family's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from engine.families.family import Config
from engine.layers import Attention, Layer

FULL, SLIDING = "full_attention", "sliding_attention"

Rule: TypeAlias = Callable[[Config, int], bool]
"""Whether a layer has the window, where `layer_types` is absent."""


def full(config: Config) -> tuple[Layer, ...]:
    """Layers that all see everything."""
    return _layers(config, [0] * num_layers(config))


def windowed(config: Config) -> tuple[Layer, ...]:
    """Layers that all have the configuration's window, or none."""
    return _layers(config, [window_of(config)] * num_layers(config))


def latent(config: Config) -> tuple[Layer, ...]:
    """Layers that cache one row for all heads: the latent, and the key's rotary part."""
    row = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    return (Layer(attention=Attention(num_kv_heads=1, key_dim=row, value_dim=0, kind="latent")),) * num_layers(config)


def mixed(rule: Rule) -> Callable[[Config], tuple[Layer, ...]]:
    """Layers of which some have the window, by `layer_types` or else by `rule`."""

    def describe(config: Config) -> tuple[Layer, ...]:
        types = layer_types(config, rule)
        window = window_of(config)
        if SLIDING in types and not window:
            raise ValueError(f"{types.count(SLIDING)} of its layers have a sliding window, whose size it does not say")
        return _layers(config, [window if one == SLIDING else 0 for one in types])

    return describe


def layer_types(config: Config, rule: Rule) -> list[str]:
    """One of `FULL` and `SLIDING` for each layer."""
    written = config.get("layer_types")
    if written is None:
        return [SLIDING if rule(config, index) else FULL for index in range(num_layers(config))]
    if len(written) != num_layers(config):
        raise ValueError(f"it has {num_layers(config)} layers and {len(written)} layer_types")
    return list(written)


def num_layers(config: Config) -> int:
    """The number of layers."""
    return int(config["num_hidden_layers"])


def window_of(config: Config) -> int:
    """The window in tokens; 0 when there is none, or it is switched off as in Qwen's configurations."""
    if not config.get("use_sliding_window", True):
        return 0
    window = config.get("sliding_window")
    if window is None:
        return 0
    if int(window) < 1:
        raise ValueError(f"sliding_window is {window}")
    return int(window)


def every_nth_is_full(count: int, named: str = "") -> Rule:
    """Layers `count`, 2 * `count`, … see everything. Older configurations may have the count, by the name `named`."""
    return lambda config, index: (index + 1) % int(config.get(named, count)) != 0


def _layers(config: Config, windows: Sequence[int]) -> tuple[Layer, ...]:
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
    kinds = {
        window: Layer(
            attention=Attention(
                num_kv_heads=num_kv_heads,
                key_dim=head_dim,
                value_dim=head_dim,
                kind="window" if window else "full",
                window=window,
            )
        )
        for window in set(windows)
    }
    return tuple(kinds[window] for window in windows)
