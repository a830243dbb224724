"""The medians as a picture. matplotlib is the optional extra `bench`, imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.errors import BadRequest
from bench.transfer.grid import in_units
from bench.transfer.measure import OPS
from bench.transfer.report import Row

FORMATS = (".png", ".svg")


def check_plot(file: Path) -> None:
    """Find out before anything is measured whether a picture can be made.

    Raises:
        BadRequest: the ending is unknown, or matplotlib is not installed.
    """
    if file.suffix.lower() not in FORMATS:
        raise BadRequest(f"--plot {file}: a picture is a {' or '.join(FORMATS)} file")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadRequest("--plot needs matplotlib; install the extra: pip install 'kvferry[bench]'") from None


def write_plot(rows: Sequence[Row], file: Path) -> None:
    """A panel for each operation and page count: GB/s over the page size, with the middle half of the rounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({row.pages for row in rows})
    figure = Figure(figsize=(4.2 * len(counts), 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(OPS), len(counts), sharex=True, sharey="row", squeeze=False)
    transports = list(dict.fromkeys(row.transport for row in rows))
    for line, op in zip(panels, OPS, strict=True):
        for panel, pages in zip(line, counts, strict=True):
            for colour, transport in enumerate(transports):
                its = [row for row in rows if (row.transport, row.op, row.pages) == (transport, op, pages)]
                if not its:
                    continue
                sizes = [row.page_bytes for row in its]
                moved = [row.page_bytes * row.pages / 1e3 for row in its]
                slow = [total / row.upper_us for total, row in zip(moved, its, strict=True)]
                fast = [total / row.lower_us for total, row in zip(moved, its, strict=True)]
                panel.plot(sizes, [row.gb_per_s for row in its], marker=".", color=f"C{colour}", label=transport)
                panel.fill_between(sizes, slow, fast, color=f"C{colour}", alpha=0.15)
            every = sorted({row.page_bytes for row in rows})
            panel.set(xscale="log", yscale="log", title=f"{op.upper()}, {pages} pages", xticks=every)
            panel.set_xticklabels([in_units(size) for size in every], rotation=45)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        line[0].set_ylabel("GB/s")
    panels[0][0].legend(fontsize="small")
    figure.savefig(file)
