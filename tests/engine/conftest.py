"""Models that several tests share."""

from __future__ import annotations

import pytest

from tests.engine.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny Llama, in float32."""
    return make_tiny(tmp_path_factory.mktemp("llama"))
