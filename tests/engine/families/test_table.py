"""docs/models.md is what the allowlist says."""

from __future__ import annotations

from pathlib import Path

from engine.families import FAMILIES
from engine.families.table import page
from tests.engine.tiny import MODEL_TYPES


def test_the_page_is_up_to_date() -> None:
    written = Path(__file__).parents[3] / "docs" / "models.md"
    assert written.read_text(encoding="utf-8") == page(), "run `make generate` and commit the result"


def test_every_family_has_a_tiny_model_that_is_tested() -> None:
    assert MODEL_TYPES.keys() == FAMILIES.keys()
