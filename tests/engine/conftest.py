"""Models that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import _native
from tests.engine.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny Llama, in float32."""
    return make_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def kernels() -> Iterator[None]:
    """Whatever a test chooses, instruction set and threads, is undone after it."""
    yield
    _native.use_isa(_native.available_isas()[0])
    _native.use_threads(1)
