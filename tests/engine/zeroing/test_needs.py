"""Which pools have to be zeroed."""

from __future__ import annotations

import pytest

from connector.pages import Group, GroupSpec, StateSpec
from engine.zeroing.needs import needs_kv_cache_zeroing


def attention(itemsize: int) -> GroupSpec:
    return GroupSpec(name=f"a{itemsize}", layers=(0,), num_kv_heads=1, key_dim=4, value_dim=4, itemsize=itemsize)


STATE = StateSpec(name="s", layers=(1,), conv_bytes=4, ssm_bytes=4, conv_dtype="bfloat16", ssm_dtype="float32")


@pytest.mark.parametrize(
    ("groups", "needed"),
    [
        ([attention(2)], False),
        ([attention(2), attention(2)], False),
        ([attention(2), attention(1)], True),
        ([attention(2), STATE], True),
        ([STATE], True),
    ],
)
def test_recurrent_layers_or_more_than_one_precision(groups: list[Group], needed: bool) -> None:
    assert needs_kv_cache_zeroing(groups) is needed
