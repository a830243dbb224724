from __future__ import annotations

import numpy as np
import pytest

from connector import LAYOUTS
from connector.plan import plan_read
from connector.write_plan import WritePlanner
from tests.connector.geometries import carry_out, every_group, memory

THEIRS = {"full": [3, 9, 1, 2], "window": [4, 0], "latent": [5, 6, 7, 8], "state": [2]}
OURS = {"full": [1, 8], "window": [6], "latent": [0, 3], "state": [0]}
LAYERS = range(8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ends", [[14], [5, 10, 14], [1, 2, 3, 4, 8, 12, 13, 14], [4, 8, 12, 14]])
def test_written_in_pieces_it_is_what_a_read_would_have_moved(layout: str, ends: list[int]) -> None:
    source, destination = every_group(layout, 4), every_group("BLHNC", 4)
    sides = {
        "source": source,
        "source_blocks": THEIRS,
        "destination": destination,
        "destination_blocks": OURS,
        "local_tokens": 8,
    }
    local, remote = memory(source, 1), memory(destination, 2)
    expected = [array.copy() for array in remote]
    carry_out(plan_read(**sides, num_tokens=14).batches, "read", expected, local)  # type: ignore[arg-type]
    planner = WritePlanner(**sides, num_tokens=14)  # type: ignore[arg-type]
    moved = 0
    for end in ends:
        assert not planner.complete
        for layer in LAYERS:
            batches = planner.computed(layer, end)
            carry_out(batches, "write", local, remote)
            moved += sum(batch.runs.total_bytes for batch in batches)
            assert planner.computed(layer, end) == ()
    assert planner.complete
    assert np.array_equal(remote[0], expected[0])
    assert moved == plan_read(**sides, num_tokens=14).total_bytes  # type: ignore[arg-type]


def test_a_block_is_written_when_its_last_token_has_been_computed() -> None:
    pool = every_group("BLHNC", 4)
    planner = WritePlanner(
        source=pool, source_blocks=THEIRS, destination=pool, destination_blocks=THEIRS, num_tokens=14
    )
    page = pool.group("full").layers[0].page_bytes
    bytes_at = [sum(b.runs.total_bytes for b in planner.computed(0, end)) // page for end in (3, 4, 7, 9, 13, 14)]
    assert bytes_at == [0, 1, 0, 1, 1, 1]


def test_a_state_goes_once_with_the_last_token() -> None:
    pool = every_group("BLHNC", 4)
    planner = WritePlanner(
        source=pool, source_blocks=THEIRS, destination=pool, destination_blocks=THEIRS, num_tokens=14
    )
    assert planner.computed(6, 13) == ()
    (batch,) = planner.computed(6, 14)
    assert batch.runs.total_bytes == pool.group("state").content_bytes
