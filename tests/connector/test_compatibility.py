from __future__ import annotations

import msgspec

from connector import IncompatibleError
from connector.compatibility import find_differences
from tests.connector.pool import FULL, compatibility


def test_equal_records_have_no_differences() -> None:
    assert find_differences(compatibility(), compatibility()) == {}


def test_every_differing_field_is_named_with_both_values() -> None:
    ours = compatibility()
    theirs = compatibility(model_fingerprint="other/1", dtype="float32", tp_size=2, mode="write")
    assert find_differences(ours, theirs) == {
        "model_fingerprint": ("tiny-llama/1", "other/1"),
        "dtype": ("bfloat16", "float32"),
        "tp_size": (1, 2),
        "mode": ("read", "write"),
    }


def test_what_plans_translate_may_differ() -> None:
    assert find_differences(compatibility(), compatibility(layout="LBHNC", block_size=16)) == {}


def test_groups_are_compared_field_by_field() -> None:
    wider = msgspec.structs.replace(FULL, num_kv_heads=4, layers=(0, 1))
    assert find_differences(compatibility(), compatibility(groups=(wider,))) == {
        "groups.full.layers": ("[0, 1, 2]", "[0, 1]"),
        "groups.full.num_kv_heads": (2, 4),
    }


def test_a_missing_group_is_named() -> None:
    window = msgspec.structs.replace(FULL, name="window")
    differences = find_differences(compatibility(), compatibility(groups=(FULL, window)))
    assert differences["groups"] == ("full", "full, window")
    assert differences["groups.window.key_dim"] == (None, 4)


def test_the_error_names_the_fields_and_both_values() -> None:
    error = IncompatibleError("prefill-0", {"dtype": ("bfloat16", "float32")})
    assert str(error) == (
        "prefill-0 is incompatible with this worker (dtype: ours 'bfloat16', theirs 'float32'); "
        "start both with the same settings"
    )
