"""The KV cache groups of a model: which layers' blocks are allocated together, and how a pool is divided among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from connector.pages import GROUP_ALIGNMENT, Group, GroupSpec, StateSpec, block_bytes
from engine.blocks import Kind, StateSlots, kind_of
from engine.errors import EngineError
from engine.layers import Attention, Layer


class StateBytes(msgspec.Struct, frozen=True):
    """What a recurrent layer keeps of one sequence, in bytes; the types are those of its elements."""

    conv_bytes: int
    ssm_bytes: int
    conv_dtype: str
    ssm_dtype: str


class CacheGroup(msgspec.Struct, frozen=True):
    """One group: how its pages look, and the rule by which its blocks come and go. `attention` is None of a state."""

    spec: Group
    kind: Kind
    attention: Attention | None

    @property
    def name(self) -> str:
        """By which the pool and the connector know it."""
        return self.spec.name


def cache_groups(
    layers: Sequence[Layer],
    *,
    itemsize: int,
    scale_bytes: int = 0,
    states: Mapping[int, StateBytes] | None = None,
    aligned: bool = False,
    prefix: str = "",
    first_layer: int = 0,
) -> list[CacheGroup]:
    """Layers that cache alike share a group, named after its kind; `prefix` and `first_layer` tell a second model's
    from the first's. `itemsize` and `scale_bytes` are those of one element, and of the scale beside each row of a
    quantised cache."""
    alike: dict[Attention | StateBytes, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.attention is not None:
            alike.setdefault(layer.attention, []).append(number + first_layer)
        if layer.recurrent:
            alike.setdefault((states or {})[number], []).append(number + first_layer)
    groups = []
    names: dict[str, int] = {}
    for key, numbers in alike.items():
        kind_name = key.kind if isinstance(key, Attention) else "state"
        names[kind_name] = names.get(kind_name, 0) + 1
        name = prefix + kind_name + (f".{names[kind_name]}" if names[kind_name] > 1 else "")
        groups.append(_group(name, key, tuple(numbers), itemsize, scale_bytes, aligned))
    return groups


def _group(
    name: str, key: Attention | StateBytes, layers: tuple[int, ...], itemsize: int, scale_bytes: int, aligned: bool
) -> CacheGroup:
    if isinstance(key, StateBytes):
        state = StateSpec(
            name=name,
            layers=layers,
            conv_bytes=key.conv_bytes,
            ssm_bytes=key.ssm_bytes,
            conv_dtype=key.conv_dtype,
            ssm_dtype=key.ssm_dtype,
        )
        return CacheGroup(state, kind_of(state, aligned=aligned), None)
    spec = GroupSpec(
        name=name,
        layers=layers,
        num_kv_heads=key.num_kv_heads,
        key_dim=key.key_dim + scale_bytes,
        value_dim=key.value_dim + (scale_bytes if key.value_dim else 0),
        itemsize=itemsize,
        kind=key.kind,
    )
    return CacheGroup(spec, kind_of(spec, window=key.window), key)


def divide(
    groups: Sequence[CacheGroup],
    total_bytes: int,
    *,
    block_size: int,
    max_model_len: int,
    step_tokens: int,
    scratch: int = 0,
) -> dict[str, int]:
    """Blocks of each group, so that all run out after about as many sequences of `REFERENCE_TOKENS`. `scratch` is how
    many more slots of states each of them may need.

    Raises:
        EngineError: the pool cannot hold one sequence of one step; with the bytes it would take.
    """
    reference = min(max_model_len, REFERENCE_TOKENS)
    needs = {}
    for group in groups:
        needs[group.name] = group.kind.most_blocks(reference, step_tokens, block_size)
        if isinstance(group.kind, StateSlots):
            # Beside the running states, those that are kept for others.
            needs[group.name] += scratch + (KEPT_STATES if group.kind.aligned else 0)
    bytes_each = sum(needs[group.name] * block_bytes(group.spec, block_size) for group in groups)
    available = total_bytes - GROUP_ALIGNMENT * (len(groups) - 1)
    counts = {}
    for group in groups:
        count = max(0, available) * needs[group.name] // bytes_each
        # A group that drops tokens has to hold a window and a step; others hold shorter requests when they are small.
        least = group.kind.most_blocks(max_model_len, step_tokens, block_size) if group.kind.drops else 1
        if count < least:
            raise EngineError(
                f"engine.kv_cache_bytes is {total_bytes}, of which group {group.name!r} gets {count} blocks of "
                f"{block_bytes(group.spec, block_size)} bytes; it needs {least}: give the page pool at least "
                f"{-(-least * bytes_each // needs[group.name])} bytes"
            )
        counts[group.name] = count
    return counts


REFERENCE_TOKENS = 4096
KEPT_STATES = 4
