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

import pytest

from tests.connector.simulated_workers import NUM_BLOCKS
from tests.connector.simulation import Simulation

STEPS = 250
MOST_ACTIVE = 6
LONGEST_PROMPT = 3 * NUM_BLOCKS // 2

WEIGHTS: dict[str, dict[str, float]] = {
    "calm": {"deliver": 60, "compute": 20, "read": 20, "succeed": 20, "admit": 10, "pass_time": 5},
    "rough": {
        "deliver": 60,
        "deliver_again": 10,
        "compute": 20,
        "read": 20,
        "succeed": 10,
        "move": 10,
        "fail": 2,
        "lose": 2,
        "repeat": 2,
        "admit": 15,
        "give_up": 5,
        "pass_time": 8,
        "disconnect": 1,
    },
    "cut off": {
        "deliver": 40,
        "compute": 20,
        "read": 20,
        "succeed": 3,
        "move": 2,
        "admit": 10,
        "pass_time": 12,
        "cut_off": 4,
    },
    "deadly": {
        "deliver": 60,
        "compute": 20,
        "read": 20,
        "succeed": 3,
        "move": 10,
        "admit": 10,
        "give_up": 2,
        "pass_time": 20,
        "disconnect": 2,
        "kill_producer": 0.5,
        "kill_consumer": 0.5,
    },
}


class Run:
    """One world and what happens in it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._weights = WEIGHTS[list(WEIGHTS)[seed % len(WEIGHTS)]]
        self.world = Simulation(import_timeout_s=self._random.choice([10.0, 30.0, 100.0]))

    def play(self) -> Counter[str]:
        """Play to the end; what has been counted on the way."""
        try:
            for _ in range(STEPS):
                (name,) = self._random.choices(list(self._weights), list(self._weights.values()))
                action: Callable[[], None] = getattr(self, f"_{name}")
                action()
            self.world.heal()
        finally:
            self.world.close()
        consumer, producer = self.world.consumer, self.world.producer
        return consumer.sink.counters + consumer.ledger.counters + producer.table.counters

    def _admit(self) -> None:
        active = [transfer for transfer in self.world.consumer.transfers.values() if not transfer.over]
        if self.world.consumer.alive and len(active) < MOST_ACTIVE:
            self.world.step(self.world.consumer.begin)

    def _deliver(self, keep: bool = False) -> None:
        under_way = len(self.world.to_producer) + len(self.world.to_consumer)
        if under_way:
            self.world.deliver(self._random.randrange(under_way), keep=keep)

    def _deliver_again(self) -> None:
        self._deliver(keep=True)

    def _compute(self) -> None:
        producer = self.world.producer
        if producer.alive and producer.computing:
            at, num_tokens = self._random.randrange(len(producer.computing)), self._random.randint(1, LONGEST_PROMPT)
            self.world.step(lambda: producer.compute(at, num_tokens))

    def _read(self) -> None:
        if self.world.consumer.alive and (ready := self.world.consumer.ready()):
            transfer = self._random.choice(ready)
            self.world.step(lambda: self.world.consumer.read(transfer))

    def _give_up(self) -> None:
        if self.world.consumer.alive and self.world.consumer.transfers:
            self.world.give_up(self._random.choice(list(self.world.consumer.transfers.values())))

    def _succeed(self) -> None:
        if self.world.fabric.in_flight:
            self.world.step(self._random.choice(self.world.fabric.in_flight).succeed)

    def _move(self) -> None:
        if self.world.fabric.in_flight:
            batch = self._random.choice(self.world.fabric.in_flight)
            self.world.step(lambda: batch.move(1))

    def _fail(self) -> None:
        if self.world.fabric.in_flight:
            self.world.step(self._random.choice(self.world.fabric.in_flight).fail)

    def _lose(self) -> None:
        if self.world.fabric.in_flight:
            self.world.step(self._random.choice(self.world.fabric.in_flight).lose)

    def _repeat(self) -> None:
        if over := [batch for batch in self.world.posted if batch.terminal]:
            self.world.step(self._random.choice(over).repeat)

    def _pass_time(self) -> None:
        self.world.pass_time(self._random.choice([0.1, 1.0, 3.0, 6.0]), consumer_looks=self._random.random() < 0.7)

    def _disconnect(self) -> None:
        self.world.disconnect()

    def _cut_off(self) -> None:
        """For about as long as a lease lasts, nothing comes through."""
        for _ in range(self._random.randint(3, 8)):
            self.world.disconnect()
            self.world.pass_time(6.0, consumer_looks=self._random.random() < 0.7)
        self.world.disconnect()

    def _kill_producer(self) -> None:
        if self.world.producer.alive:
            self.world.kill_producer(reported=self._random.random() < 0.5)

    def _kill_consumer(self) -> None:
        self.world.consumer.alive = False


@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, 160, 20)], ids=str)
def test_the_protocol_holds_whatever_happens(seeds: range) -> None:
    for seed in seeds:
        Run(seed).play()


def test_the_runs_go_everywhere() -> None:
    """A random test proves nothing about what it never reaches."""
    seen: Counter[str] = Counter()
    for seed in range(80):
        seen += Run(seed).play()
    expected = {
        "imports_published",
        "imports_cancelled",
        "imports_failed_transfer_error",
        "imports_failed_timeout",
        "imports_failed_peer_lost",
        "imports_failed_source_expired",
        "completions_late",
        "peers_fenced",
        "sources_released",
        "sources_expired",
        "sources_failed",
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
