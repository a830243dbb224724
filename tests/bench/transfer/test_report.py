"""From samples to rows, ratios and the summary."""

from pathlib import Path

import msgspec
import pytest

from bench.errors import BadRequest
from bench.transfer.grid import KIB, Cell
from bench.transfer.measure import Measured
from bench.transfer.pairs import Sample
from bench.transfer.plot import check_plot
from bench.transfer.report import Ratios, opponent, rows_of, summary_of
from connector.transport.base import Op


def measured(times_us: dict[str, list[float]], op: Op = "write", pages: int = 1) -> Measured:
    samples = {name: [Sample(time, time + 100) for time in times] for name, times in times_us.items()}
    return Measured(Cell(4 * KIB, pages), op, samples)


def test_a_row_tells_median_speed_and_spread() -> None:
    [row] = rows_of(measured({"shm": [1.0, 2.0, 3.0, 4.0, 5.0]}, pages=1000))
    assert (row.transport, row.op, row.page_bytes, row.pages, row.rounds) == ("shm", "write", 4096, 1000, 5)
    assert (row.median_us, row.lower_us, row.upper_us, row.iqr_us) == (3.0, 2.0, 4.0, 2.0)
    assert row.gb_per_s == pytest.approx(4096 * 1000 / 3e-6 / 1e9, rel=1e-4)
    assert row.notified_us == 103.0


def test_what_nobody_is_told_of_has_no_notice() -> None:
    [row] = rows_of(Measured(Cell(4 * KIB, 1), "read", {"memcpy": [Sample(1.0, None)]}))
    assert row.notified_us is None
    assert row.notified_p99_us is None


def test_ratios_are_against_whoever_was_measured_next_to_it() -> None:
    rows = rows_of(measured({"memcpy": [1.0], "shm": [2.0], "nixl": [8.0]}))
    assert {row.transport: row.ratios for row in rows} == {
        "memcpy": Ratios(vs_memcpy=None, vs_nixl=8.0, vs_mooncake=None),
        "shm": Ratios(vs_memcpy=0.5, vs_nixl=4.0, vs_mooncake=None),
        "nixl": Ratios(vs_memcpy=0.125, vs_nixl=None, vs_mooncake=None),
    }


def test_what_was_kept_to_tcp_is_compared_with_the_nixl_that_was() -> None:
    assert opponent("ucx-tcp", "nixl") == opponent("tcp", "nixl") == "nixl-tcp"
    assert opponent("ucx", "nixl") == "nixl"
    assert opponent("ucx-tcp", "mooncake") == "mooncake"
    rows = rows_of(measured({"ucx-tcp": [2.0], "nixl": [1.0], "nixl-tcp": [6.0]}))
    assert rows[0].ratios.vs_nixl == 3.0


def test_the_summary_is_the_geometric_mean_over_the_grid_by_operation() -> None:
    rows = [
        *rows_of(measured({"shm": [1.0], "nixl": [2.0]}, "read", pages=1)),
        *rows_of(measured({"shm": [1.0], "nixl": [8.0]}, "read", pages=64)),
        *rows_of(measured({"shm": [2.0], "nixl": [1.0]}, "write", pages=1)),
    ]
    summary = summary_of(rows)
    assert summary["shm"]["read"] == Ratios(vs_memcpy=None, vs_nixl=4.0, vs_mooncake=None)
    assert summary["shm"]["write"].vs_nixl == 0.5
    assert msgspec.to_builtins(summary)["shm"]["read"] == {"vs_memcpy": None, "vs_nixl": 4.0, "vs_mooncake": None}


def test_a_picture_of_unknown_kind_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(BadRequest, match=r"a picture is a \.png or \.svg file"):
        check_plot(Path("transfer.gif"))
