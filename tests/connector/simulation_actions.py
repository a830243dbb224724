"""What can happen in the simulation; `choose(n)` picks one of `n`, so that random and model-based tests share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.connector.fabric import Batch
from tests.connector.simulated_workers import NUM_BLOCKS
from tests.connector.simulation import Simulation

T = TypeVar("T")

MOST_ACTIVE = 6
LONGEST_PROMPT = 3 * NUM_BLOCKS // 2


class Actions:
    """One method for each kind of event. What cannot happen at the moment does not happen."""

    def __init__(self, world: Simulation, choose: Callable[[int], int]) -> None:
        self._world = world
        self._choose = choose

    def _one_of(self, these: Sequence[T]) -> T:
        return these[self._choose(len(these))]

    def admit(self) -> None:
        """A request comes in."""
        consumer = self._world.consumer
        active = [transfer for transfer in consumer.transfers.values() if not transfer.over]
        if consumer.alive and len(active) < MOST_ACTIVE:
            num_tokens = 1 + self._choose(LONGEST_PROMPT)
            self._world.step(lambda: consumer.begin(num_tokens))

    def deliver(self, keep: bool = False) -> None:
        """Some message arrives, in whatever order."""
        under_way = len(self._world.to_producer) + len(self._world.to_consumer)
        if under_way:
            self._world.deliver(self._choose(under_way), keep=keep)

    def deliver_again(self) -> None:
        """One arrives, and will arrive again."""
        self.deliver(keep=True)

    def compute(self) -> None:
        """The forward pass goes on."""
        producer = self._world.producer
        if producer.alive and producer.computing:
            at, num_tokens = self._choose(len(producer.computing)), 1 + self._choose(LONGEST_PROMPT)
            self._world.step(lambda: producer.compute(at, num_tokens))

    def fail_step(self) -> None:
        """The forward pass fails."""
        producer = self._world.producer
        if producer.alive and producer.computing:
            at = self._choose(len(producer.computing))
            self._world.step(lambda: producer.fail(at))

    def read(self) -> None:
        """What has been computed is read."""
        consumer = self._world.consumer
        if consumer.alive and (ready := consumer.ready()):
            transfer = self._one_of(ready)
            self._world.step(lambda: consumer.read(transfer))

    def give_up(self) -> None:
        """A client leaves."""
        consumer = self._world.consumer
        if consumer.alive and consumer.transfers:
            self._world.give_up(self._one_of(list(consumer.transfers.values())))

    def succeed(self) -> None:
        """A batch completes."""
        self._with_batch(lambda batch: batch.succeed())

    def move(self) -> None:
        """A run of a batch lands."""
        self._with_batch(lambda batch: batch.move(1))

    def fail(self) -> None:
        """A batch fails, part of it having landed."""
        self._with_batch(lambda batch: batch.fail())

    def lose(self) -> None:
        """A batch lands and is never heard of again."""
        self._with_batch(lambda batch: batch.lose())

    def repeat(self) -> None:
        """A completion comes again."""
        if over := [batch for batch in self._world.posted if batch.terminal]:
            self._world.step(self._one_of(over).repeat)

    def pass_time(self) -> None:
        """Some seconds, in which the consumer may be too busy to look at its clock."""
        seconds = self._one_of([0.1, 1.0, 3.0, 6.0])
        self._world.pass_time(seconds, consumer_looks=self._choose(10) < 7)

    def jump(self) -> None:
        """The consumer's clock jumps ahead."""
        self._world.jump(self._one_of([7.0, 40.0]))

    def disconnect(self) -> None:
        """The control connection breaks, and is made again."""
        self._world.disconnect()

    def lose_data_connection(self) -> None:
        """Torn down by mistake: the producer lives."""
        if self._world.consumer.alive:
            self._world.lose_data_connection()

    def cut_off(self) -> None:
        """For about as long as a lease lasts, nothing comes through."""
        for _ in range(3 + self._choose(6)):
            self._world.disconnect()
            self._world.pass_time(6.0, consumer_looks=self._choose(10) < 7)
        self._world.disconnect()

    def kill_producer(self) -> None:
        """With or without anybody being told."""
        if self._world.producer.alive:
            self._world.kill_producer(reported=bool(self._choose(2)))

    def restart_producer(self) -> None:
        """A new incarnation takes the dead one's place."""
        if not self._world.producer.alive and self._world.consumer.alive:
            self._world.restart_producer()

    def kill_consumer(self) -> None:
        """For good."""
        self._world.consumer.alive = False

    def _with_batch(self, do: Callable[[Batch], None]) -> None:
        if in_flight := self._world.fabric.in_flight:
            batch = self._one_of(in_flight)
            self._world.step(lambda: do(batch))
