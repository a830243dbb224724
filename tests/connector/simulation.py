"""A prefill and a decode worker without sockets: the real state machines and what carries them out, between a simulated
network and the scripted fabric, on two clocks that a test advances.

Whoever drives it chooses what happens next: which message is delivered, repeated or lost, which batch moves, fails or
is never heard of again, who dies and comes back, how much time passes. What must hold whatever is chosen is checked
after every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from connector import EngineId, ImportFailed
from tests.connector.fabric import Batch, Fabric
from tests.connector.pool import P
from tests.connector.simulated_workers import (
    CALL,
    LEASE_S,
    NUM_BLOCKS,
    Ask,
    Consumer,
    Message,
    Mode,
    Producer,
    Transfer,
)


class Simulation:
    """The two, and what is between them."""

    def __init__(self, import_timeout_s: float, mode: Mode = "read") -> None:
        self.import_timeout_s = import_timeout_s
        self.mode = mode
        self.loop = asyncio.new_event_loop()
        self.fabric = Fabric(automatic=False)
        self.to_producer: list[Message] = []
        self.to_consumer: list[Message] = []
        self.posted: list[Batch] = []
        self.fabric.on_post = self.posted.append
        self.past: list[Producer] = []
        self.steps = 0
        self.loop.run_until_complete(self._make())

    async def _make(self) -> None:
        self.producer = Producer(self.fabric, P, self.to_consumer.append)
        self.consumer = Consumer(self.fabric, self.mode, self.to_producer.append, self.import_timeout_s)
        self.consumer.connect(self.producer)
        self.producer.connected(self.consumer.record)

    # Steps

    def step(self, action: Callable[[], None] = lambda: None) -> None:
        """Do something, let everything that follows from it happen, and check."""
        self.steps += 1
        self.loop.run_until_complete(self._step(action))
        self.check()

    async def _step(self, action: Callable[[], None]) -> None:
        action()
        for _ in range(4):
            await asyncio.sleep(0)
        if self.consumer.alive:
            self.consumer.speak()

    def give_up(self, transfer: Transfer) -> None:
        """The client of one transfer is gone. Its request may never reach the producer then."""
        if self.mode == "read":
            self.to_producer[:] = [
                message
                for message in self.to_producer
                if not (isinstance(message, Ask) and message.transfer_id == transfer.transfer_id)
            ]
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
        """The control connection breaks, and is made again: what was on it is lost, and what is owed is owed again."""
        for queue in (self.to_producer, self.to_consumer):
            queue[:] = [message for message in queue if isinstance(message, CALL)]

        def again() -> None:
            self.consumer.ledger.disconnected()
            if self.producer.alive:
                self.producer.connected(self.consumer.record)

        self.step(again)

    def pass_time(self, seconds: float, *, consumer_looks: bool = True) -> None:
        """On both clocks. A consumer that is busy or stopped may not look at its own until later."""
        self.producer.clock.advance(seconds)
        self.consumer.clock.advance(seconds)

        def look() -> None:
            if self.producer.alive:
                self.producer.sources.reap()
            if self.consumer.alive and consumer_looks:
                self.consumer.importer.tick()

        self.step(look)

    def jump(self, seconds: float) -> None:
        """The consumer's clock jumps ahead of the producer's, as after a suspension: its leases look older than they
        are, never younger."""
        self.consumer.clock.advance(seconds)
        self.step(self.consumer.importer.tick if self.consumer.alive else lambda: None)

    def lose_data_connection(self) -> None:
        """The consumer's data connection is torn down while the producer lives, and made anew."""
        link, fabric = self.consumer.link, "fabric"
        if link.data_peer is None:
            return

        def lose() -> None:
            self.consumer.end.mark_down(link._reached_by[1], "its time has passed", gone=False)

        def again() -> None:
            data_peer = self.consumer.lanes.connect({fabric: self.producer.end.describe()}, str(link.peer))
            self.consumer.importer.moved(link._reached_by, data_peer)
            link._data_peer = link._reached_by = data_peer

        self.step(lose)
        if self.producer.alive:
            self.step(again)

    def kill_producer(self, *, reported: bool) -> None:
        """Its process is gone; its memory may still be read."""
        self.producer.alive = False
        self.step(lambda: self.fabric.kill(str(self.producer.engine_id), reported=reported))

    def restart_producer(self) -> None:
        """A new incarnation of a dead producer answers the consumer's handshake, which proves that the old one ended.
        Messages for the old one are still under way."""
        self.step(self.consumer.producer_ended)
        self.past.append(self.producer)

        def start() -> None:
            engine_id = EngineId(P.name, self.producer.engine_id.incarnation + 1)
            clock = self.producer.clock
            self.producer = Producer(self.fabric, engine_id, self.to_consumer.append)
            self.producer.clock.advance(clock() - self.producer.clock())
            for transfer in self.consumer.transfers.values():  # their calls have failed with the process
                if transfer.receive is None and transfer.waiting is None:
                    transfer.over = True
            self.consumer.connect(self.producer)
            self.producer.connected(self.consumer.record)

        self.step(start)

    def heal(self) -> None:
        """No more faults: whoever is alive ends everything, within bounded time."""
        expired, given_up = list(self.producer.expired), self.consumer.ledger.counters["acks_given_up"]
        if not self.producer.alive:
            self.step(self.consumer.producer_ended)
        for batch in self.posted:
            if batch.lost and batch.initiator.alive:
                self.step(batch.outlive)
        self.disconnect()
        for _ in range(int(2 * LEASE_S + self.import_timeout_s)):
            self._settle_at_this_instant()
            self.pass_time(1.0)
        self._settle_at_this_instant()
        if self.consumer.alive:
            self._check_consumer_is_done()
        if self.producer.alive:
            assert self.producer.table.active == 0
            assert len(self.producer.pool.free) == NUM_BLOCKS
            assert set(self.producer.ends.values()) <= {1}
        if self.producer.alive and self.consumer.alive and not given_up:
            assert self.producer.expired == expired, "a source had to wait for its lease although its consumer is alive"

    def _check_consumer_is_done(self) -> None:
        consumer = self.consumer
        assert consumer.sink.active == 0
        assert len(consumer.pool.free) == NUM_BLOCKS
        assert consumer.ledger.wanted == []
        assert consumer.ledger.unconfirmed == []
        for transfer in consumer.transfers.values():
            assert transfer.over
            assert len(transfer.outcomes) == (transfer.waiting is not None or transfer.receive is not None)
            assert transfer.waiting is None or transfer.waiting.done()

    def _settle_at_this_instant(self) -> None:
        while True:
            self.step()
            if self.to_producer or self.to_consumer:
                self.deliver(0)
            elif self.producer.alive and self.producer.computing:
                self.step(lambda: self.producer.compute(0, 7))
            elif moving := [batch for batch in self.fabric.in_flight if batch.initiator.alive]:
                self.step(moving[0].succeed)
            elif self.consumer.alive and (unread := self._unread()) is not None:
                self.give_up(unread)
            else:
                return

    def _unread(self) -> Transfer | None:
        """A transfer that waits for nothing that could still come."""
        for transfer in self.consumer.transfers.values():
            if transfer.pull is not None and not transfer.over and transfer.waiting is None:
                return transfer
        return None

    # What must hold

    def check(self) -> None:
        """The invariants of the protocol, after every event."""
        self.producer.table.validate()
        self.consumer.sink.validate()
        assert self.consumer.faults == []
        assert self.producer.faults == []
        assert self.consumer.foreign == [], "pages were published that the producer did not hold for this transfer"
        assert self.consumer.pool.custody.violations == []
        assert self.producer.pool.custody.violations == []
        for transfer in self.consumer.transfers.values():
            assert len(transfer.outcomes) <= 1
            if transfer.waiting is not None and transfer.waiting.done() and not transfer.waiting.cancelled():
                assert isinstance(transfer.waiting.exception(), ImportFailed | None)

    def close(self) -> None:
        """Give everything back."""

        async def close() -> None:
            for producer in [*self.past, self.producer]:
                producer.lanes.close()
            self.consumer.lanes.close()
            self.consumer.importer.close()
            tasks = [transfer.waiting for transfer in self.consumer.transfers.values() if transfer.waiting]
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(close())
        self.loop.close()
