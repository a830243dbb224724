"""Which variants of the native kernels there are, and that one that does not run here is refused."""

from __future__ import annotations

import pytest

from engine._native import available_isas, use_isa, use_threads


def test_there_is_always_a_baseline_and_it_comes_last() -> None:
    assert available_isas()[-1] == "baseline"


def test_every_variant_there_is_can_be_used(kernels: None) -> None:
    for name in reversed(available_isas()):
        use_isa(name)


def test_an_unknown_variant_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"kernels for mmx do not run here; there are: .*baseline"):
        use_isa("mmx")


def test_fewer_than_one_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot compute with 0 threads"):
        use_threads(0)
