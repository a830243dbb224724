"""The hand-off under random faults: what must be provable of the protocol, checked after every event.

1. No block has two owners, and every block is free in the end.
2. No byte is written into a block after its ownership has ended.
3. Pages that are published are those that the producer held for this transfer.
4. Every transfer ends exactly once on each side, within bounded time after the last fault.
5. No source waits for its lease to end, unless its consumer died or was cut off.

A run is made by its seed: `Run(seed).play()` plays a failure again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest

from tests.connector.simulated_workers import Mode
from tests.connector.simulation import Simulation
from tests.connector.simulation_actions import Actions

STEPS = 250
MODES: list[Mode] = ["read", "write"]

FAULTS: dict[str, float] = {
    "deliver_again": 10,
    "fail": 2,
    "lose": 2,
    "repeat": 2,
    "fail_step": 1,
    "give_up": 5,
    "disconnect": 1,
}
BUSY: dict[str, float] = {"deliver": 60, "compute": 40, "read": 20, "succeed": 20, "admit": 12, "pass_time": 5}
WEIGHTS: dict[str, dict[str, float]] = {
    "calm": BUSY,
    "rough": BUSY | FAULTS | {"succeed": 10, "move": 10, "pass_time": 8, "admit": 15},
    "fickle": BUSY | {"deliver": 20, "give_up": 25, "admit": 30, "compute": 60, "pass_time": 1},
    "starved": BUSY | {"succeed": 4, "move": 4, "cut_off": 3, "pass_time": 3, "admit": 30, "lose_data_connection": 1},
    "cut off": BUSY | {"deliver": 40, "succeed": 3, "move": 2, "pass_time": 12, "cut_off": 4},
    "deadly": BUSY
    | {"succeed": 3, "move": 10, "give_up": 2, "pass_time": 20, "disconnect": 2, "jump": 1}
    | {"kill_producer": 0.5, "kill_consumer": 0.25, "restart_producer": 4},
}


class Run:
    """One world and what happens in it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        kinds = list(product(WEIGHTS, MODES))
        weights, mode = kinds[seed % len(kinds)]
        self._weights = WEIGHTS[weights]
        self.world = Simulation(self._random.choice([10.0, 30.0, 100.0]), mode)

    def play(self) -> Counter[str]:
        """Play to the end; what has been counted on the way."""
        actions = Actions(self.world, self._random.randrange)
        try:
            for _ in range(STEPS):
                (name,) = self._random.choices(list(self._weights), list(self._weights.values()))
                act: Callable[[], None] = getattr(actions, name)
                act()
            self.world.heal()
        finally:
            self.world.close()
        consumer, producer = self.world.consumer, self.world.producer
        counted = consumer.sink.counters + consumer.counters
        for one in [*self.world.past, producer]:
            counted += one.table.counters
        return counted


@pytest.mark.parametrize("seeds", [range(first, first + 30) for first in range(0, 240, 30)], ids=str)
def test_the_protocol_holds_whatever_happens(seeds: range) -> None:
    for seed in seeds:
        Run(seed).play()


def test_the_runs_go_everywhere() -> None:
    """A random test proves nothing about what it never reaches."""
    seen: Counter[str] = Counter()
    for seed in range(96):
        seen += Run(seed).play()
    expected = {
        "imports_published",
        "imports_cancelled",
        "imports_failed_transfer_error",
        "imports_failed_timeout",
        "imports_failed_peer_lost",
        "imports_failed_source_expired",
        "completions_late",
        "imports_failed_producer_failed",
        "peers_fenced",
        "sources_released",
        "sources_expired",
        "sources_failed",
        "sources_flushed",
        "sources_refused",
        "cancels",
        "commits_unknown",
        "write_ends_unknown",
        "leases_expired_pushing",
        "acks_parked",
        "acks_duplicate",
        "acks_stale",
        "acks_confirmed",
        "acks_given_up",
        "renewals",
        "renewals_unknown",
        "sources_ended_early",
    }
    assert expected - set(seen) == set()
