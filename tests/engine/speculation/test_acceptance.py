"""Which drafts were right."""

from __future__ import annotations

import pytest

from engine.sampler import Drawn
from engine.speculation.acceptance import accept


def drawn(*tokens: int | None) -> list[Drawn | None]:
    return [None if token is None else Drawn(token, -1.0) for token in tokens]


@pytest.mark.parametrize(
    ("drafts", "rows", "standing"),
    [
        ([], [], []),
        ([], [5], [5]),
        ([5, 6], [5, 6, 7], [5, 6, 7]),
        ([5, 6], [5, 9, 7], [5, 9]),
        ([5, 6], [4, 6, 7], [4]),
        ([5, 6], [5, None, 7], [5, None]),
        ([5, 6], [None, 6, 7], [None]),
    ],
)
def test_rows_stand_up_to_the_first_that_its_draft_does_not_foresee(
    drafts: list[int], rows: list[int | None], standing: list[int | None]
) -> None:
    assert accept(drafts, drawn(*rows)) == drawn(*standing)
