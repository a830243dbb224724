"""A prefill and a decode worker without sockets: the real state machines, importer and ledger between a simulated
network and the scripted fabric, on two clocks that a test advances.

Whoever drives it chooses what happens next: which message is delivered, repeated or lost, which batch moves, fails or
is never heard of again, who dies, how much time passes. What must hold whatever is chosen is checked after every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from connector import ImportFailed
from tests.connector.fabric import Batch, Fabric
from tests.connector.simulated_workers import (
    CALL,
    LEASE_S,
    NUM_BLOCKS,
    Ask,
    Consumer,
    Message,
    Producer,
    Transfer,
)


class Simulation:
    """The two, and what is between them."""

    def __init__(self, import_timeout_s: float) -> None:
        self.import_timeout_s = import_timeout_s
        self.loop = asyncio.new_event_loop()
        self.fabric = Fabric(automatic=False)
        self.to_producer: list[Message] = []
        self.to_consumer: list[Message] = []
        self.posted: list[Batch] = []
        self.fabric.on_post = self.posted.append
        self.producer = Producer(self.to_consumer.append)
        end = self.fabric.transport("prefill", self.producer.pool.custody)
        end.register(self.producer.pool.memory)
        self.consumer = self.loop.run_until_complete(self._make_consumer())

    async def _make_consumer(self) -> Consumer:
        return Consumer(self.fabric, self.producer.pool, self.to_producer.append, self.import_timeout_s)

    # Steps

    def step(self, action: Callable[[], None] = lambda: None) -> None:
        """Do something, let everything that follows from it happen, and check."""
        self.loop.run_until_complete(self._step(action))
        self.check()

    async def _step(self, action: Callable[[], None]) -> None:
        action()
        for _ in range(4):
            await asyncio.sleep(0)
        if self.consumer.alive:
            self.consumer.speak()

    def give_up(self, transfer: Transfer) -> None:
        """The client of one transfer is gone."""
        ask = Ask(transfer.pull.transfer_id)
        if ask in self.to_producer:
            self.to_producer.remove(ask)
        self.loop.run_until_complete(self.consumer.give_up(transfer))
        self.step()

    def deliver(self, at: int, *, keep: bool = False) -> None:
        """Deliver one of the messages under way; with `keep`, one of the control connection's comes again."""
        queue, receiver = (
            (self.to_producer, self.producer) if at < len(self.to_producer) else (self.to_consumer, self.consumer)
        )
        at -= 0 if receiver is self.producer else len(self.to_producer)
        message = queue[at]
        if not (keep and not isinstance(message, CALL)):
            del queue[at]
        if receiver.alive:
            self.step(lambda: receiver.receive(message))

    def disconnect(self) -> None:
        """The control connection breaks: what was on it is lost, and what is owed is owed again."""
        for queue in (self.to_producer, self.to_consumer):
            queue[:] = [message for message in queue if isinstance(message, CALL)]
        self.step(self.consumer.ledger.disconnected)

    def pass_time(self, seconds: float, *, consumer_looks: bool = True) -> None:
        """On both clocks. A consumer that is busy or stopped may not look at its own until later."""
        self.producer.clock.advance(seconds)
        self.consumer.clock.advance(seconds)
        if self.producer.alive:
            self.producer.reap()
        self.step(self.consumer.importer.tick if self.consumer.alive and consumer_looks else lambda: None)

    def kill_producer(self, *, reported: bool) -> None:
        """Its process is gone; its memory may still be read."""
        self.producer.alive = False
        self.step(lambda: self.fabric.kill("prefill", reported=reported))

    def heal(self) -> None:
        """No more faults: whoever is alive ends everything, within bounded time."""
        expired, given_up = list(self.producer.expired), self.consumer.ledger.counters["acks_given_up"]
        self.disconnect()
        for _ in range(int(2 * LEASE_S + self.import_timeout_s)):
            self._settle_at_this_instant()
            self.pass_time(1.0)
        self._settle_at_this_instant()
        if self.consumer.alive:
            assert self.consumer.sink.active == 0
            assert len(self.consumer.pool.free) == NUM_BLOCKS
            assert self.consumer.ledger.wanted == []
            assert self.consumer.ledger.unconfirmed == []
            for transfer in self.consumer.transfers.values():
                assert transfer.over
                assert len(transfer.outcomes) == (transfer.reading is not None)
                assert transfer.reading is None or transfer.reading.done()
        if self.producer.alive:
            assert self.producer.table.active == 0
            assert len(self.producer.pool.free) == NUM_BLOCKS
            assert set(self.producer.ends.values()) <= {1}
        if self.producer.alive and self.consumer.alive and not given_up:
            assert self.producer.expired == expired, "a source had to wait for its lease although its consumer is alive"

    def _settle_at_this_instant(self) -> None:
        while True:
            self.step()
            if self.to_producer or self.to_consumer:
                self.deliver(0)
            elif self.producer.alive and self.producer.computing:
                self.step(lambda: self.producer.compute(0, 7))
            elif self.consumer.alive and self.fabric.in_flight:
                self.step(self.fabric.in_flight[0].succeed)
            elif self.consumer.alive and (unread := self._unread()) is not None:
                self.give_up(unread)
            else:
                return

    def _unread(self) -> Transfer | None:
        """A transfer that waits for nothing that could still come."""
        for transfer in self.consumer.transfers.values():
            if not transfer.over and transfer.reading is None:
                return transfer
        return None

    # What must hold

    def check(self) -> None:
        """The invariants of the protocol, after every event."""
        self.producer.table.validate()
        self.consumer.sink.validate()
        assert self.consumer.faults == []
        assert self.consumer.foreign == [], "pages were published that the producer did not hold for this transfer"
        assert self.consumer.pool.custody.violations == []
        for transfer in self.consumer.transfers.values():
            assert len(transfer.outcomes) <= 1
            if transfer.reading is not None and transfer.reading.done() and not transfer.reading.cancelled():
                assert isinstance(transfer.reading.exception(), ImportFailed | None)

    def close(self) -> None:
        """Give everything back."""

        async def close() -> None:
            self.consumer.lanes.close()
            self.consumer.importer.close()
            tasks = [transfer.reading for transfer in self.consumer.transfers.values() if transfer.reading]
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(close())
        self.loop.close()
