"""What the connector's own work costs, without moving a byte: python -m bench.bookkeeping

Plans of many scattered blocks in every layout, leases of many held sources, frames of the control connection.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from connector import LAYOUTS, EngineId, GroupSpec, build_geometry
from connector.plan import plan_read
from connector.source_table import SourceTable
from connector.wire import Renew, Seal, encode, sealed

BLOCKS = 10_000
SOURCES = 10_000
ROUNDS = 9
CONSUMER, PRODUCER = EngineId("decode-0", 1), EngineId("prefill-0", 2)


def median_ms(what: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Of a few runs."""
    times = []
    for _ in range(rounds):
        before = time.perf_counter()
        what()
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times)


def plans(blocks: int) -> Iterator[tuple[str, float]]:
    """One plan of so many scattered blocks × 32 layers, by layout."""
    heads = {"LHBNC": 1}  # one run for each head there: the same number of runs as elsewhere
    random = np.random.default_rng(1)
    theirs, ours = ({"full": random.permutation(2 * blocks)[:blocks].tolist()} for _ in range(2))
    for layout in LAYOUTS:
        group = GroupSpec(
            name="full",
            layers=tuple(range(32)),
            num_kv_heads=heads.get(layout, 8),
            key_dim=64,
            value_dim=64,
            itemsize=2,
        )
        pool = build_geometry([group], layout=layout, block_size=16, num_blocks={"full": 2 * blocks})

        def plan() -> int:
            return plan_read(
                source=pool,  # noqa: B023
                source_blocks=theirs,
                destination=pool,  # noqa: B023
                destination_blocks=ours,
                num_tokens=16 * blocks,
            ).operations

        yield f"plan {blocks} blocks x 32 layers, {layout}: {plan()} runs", median_ms(plan)


def leases(sources: int) -> Iterator[tuple[str, float]]:
    """Renewals and the reaper."""
    table = SourceTable(30.0, 60.0)
    ids = [f"{number:032x}" for number in range(sources)]
    for transfer_id in ids:
        table.open(transfer_id, CONSUMER, 0.0)
        table.hold(transfer_id, 1, 0.0)
    renewal = Renew(consumer=CONSUMER, producer=PRODUCER, sequence=1, transfer_ids=ids)
    yield f"encode one renewal of {sources} sources, {len(encode(renewal))} bytes", median_ms(lambda: encode(renewal))
    yield f"renew {sources} sources", median_ms(lambda: [table.renew(one, CONSUMER, 1.0) for one in ids])
    yield f"reap {sources} held sources", median_ms(lambda: table.reap(20.0))


def frames() -> Iterator[tuple[str, float]]:
    """One small frame."""
    seal, data = Seal(b"k" * 32), encode(Renew(consumer=CONSUMER, producer=PRODUCER, sequence=1, transfer_ids=[]))
    yield "tag a frame", median_ms(lambda: [sealed(data, seal) for _ in range(1000)]) / 1000


def main(blocks: int = BLOCKS, sources: int = SOURCES) -> None:
    """Print all of it."""
    for what, took_ms in [*plans(blocks), *leases(sources), *frames()]:
        print(f"{took_ms:10.3f} ms  {what}")


if __name__ == "__main__":
    main()
