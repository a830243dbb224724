"""The two workers of the simulation: the real state machines, importer and ledger, without sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from connector import Imported, ImportOutcome, InvalidTransition, Pull, SourceRef, new_transfer_id
from connector.importer import Importer
from connector.imports import PeerKey
from connector.lanes import Lanes
from connector.lease import Lease
from connector.ledger import Ledger
from connector.link import Link
from connector.sink import Sink
from connector.source import Ended, Instruction, SourceState
from connector.source_table import SourceTable
from connector.wire import Ack, AckReply, Cancel, Renew, RenewReply
from tests.clock import FakeClock
from tests.connector.fabric import Fabric
from tests.connector.pool import BLOCK_SIZE, D, P, Pool

LEASE_S, RENEW_S = 30.0, 5.0
EPOCH_GAP_S = 1e6
NUM_BLOCKS = 8


class Ask(msgspec.Struct, frozen=True):
    """The `Prefill` call."""

    transfer_id: str


class CancelCall(msgspec.Struct, frozen=True):
    """The `Prefill` call is cancelled."""

    transfer_id: str


class Answer(msgspec.Struct, frozen=True):
    """The `Prefill` call's answer: where the pages are, or None for a failure."""

    transfer_id: str
    source: SourceRef | None


Message: TypeAlias = Ask | CancelCall | Answer | Renew | RenewReply | Ack | AckReply | Cancel
CALL = (Ask, CancelCall, Answer)
"""What travels by gRPC: delivered once, or not at all. The rest is the control connection's."""


class Producer:
    """The prefill side."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.clock = FakeClock(EPOCH_GAP_S)
        self.table = SourceTable(LEASE_S, warn_after_s=2 * LEASE_S)
        self.pool = Pool(NUM_BLOCKS)
        self.alive = True
        self.computing: list[str] = []
        self.blocks: dict[str, list[int]] = {}
        self.ends: Counter[str] = Counter()
        self.expired: list[str] = []
        self._send = send

    def compute(self, at: int, num_tokens: int) -> None:
        """A prompt has been computed, or there is no room for it."""
        transfer_id = self.computing.pop(at % len(self.computing))
        needed = -(-num_tokens // BLOCK_SIZE)
        if needed > len(self.pool.free):
            self._carry_out(self.table.fail(transfer_id, "no free blocks", self.clock()))
            self._send(Answer(transfer_id, None))
            return
        self.blocks[transfer_id] = blocks = self.pool.take(needed)
        self.pool.fill(blocks, seed_of(transfer_id))
        self.table.hold(transfer_id, needed, self.clock())
        source = SourceRef(transfer_id=transfer_id, producer=P, blocks={"full": blocks}, num_tokens=num_tokens)
        self._send(Answer(transfer_id, source))

    def receive(self, message: Message) -> None:
        """A message has arrived."""
        now = self.clock()
        match message:
            case Ask(transfer_id):
                try:
                    self.table.open(transfer_id, D, now)
                except InvalidTransition:
                    self._send(Answer(transfer_id, None))
                else:
                    self.computing.append(transfer_id)
            case CancelCall(transfer_id):
                if self.table.state(transfer_id) is SourceState.COMPUTING:
                    self._carry_out(self.table.fail(transfer_id, "the call was cancelled", now))
            case Renew():
                statuses = {id_: self.table.renew(id_, message.consumer, now) for id_ in message.transfer_ids}
                renewed = [id_ for id_, status in statuses.items() if status == "renewed"]
                ended = [id_ for id_, status in statuses.items() if status == "ended"]
                self._send(RenewReply(consumer=D, producer=P, sequence=message.sequence, renewed=renewed, ended=ended))
            case Ack():
                status, instructions = self.table.ack(
                    message.transfer_id, message.consumer, message.rank, message.world_size, message.outcome, now
                )
                self._carry_out(instructions)
                self._send(AckReply(consumer=D, producer=P, transfer_id=message.transfer_id, status=status))
            case _:
                raise AssertionError(f"not for a producer: {message}")

    def reap(self) -> None:
        """Look at the leases."""
        self._carry_out(self.table.reap(self.clock()))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Ended):
                self.ends[instruction.transfer_id] += 1
                if instruction.outcome == "expired":
                    self.expired.append(instruction.transfer_id)
                if instruction.transfer_id in self.computing:
                    self.computing.remove(instruction.transfer_id)
                self.pool.give_back(self.blocks.pop(instruction.transfer_id, []))


class SimulatedLink(Link):
    """What a pull needs of a link: the ledger and the data peer, and a network that is not its business."""

    def __init__(self, ledger: Ledger, clock: FakeClock, pool: Pool, data_peer: PeerKey) -> None:
        self.peer = P
        self.geometry = pool.geometry
        self.ledger = ledger
        self._clock = clock
        self._data_peer = data_peer
        self._wake = asyncio.Event()
        self._connection = None

    def lose_data_peer(self, peer: PeerKey, cause: str) -> None:
        """It has been fenced; there is no other one in this world."""
        self._data_peer = None

    def begin(self, transfer_id: str) -> Lease:
        """See `Link`."""
        return self.ledger.begin(transfer_id, self._clock())


class Transfer:
    """One request as the decode side sees it."""

    def __init__(self, pull: Pull) -> None:
        self.pull = pull
        self.source: SourceRef | None = None
        self.blocks: list[int] = []
        self.outcomes: list[ImportOutcome] = []
        self.reading: asyncio.Task[Imported] | None = None
        self.over = False


class Consumer:
    """The decode side."""

    def __init__(
        self, fabric: Fabric, producer: Pool, send: Callable[[Message], None], import_timeout_s: float
    ) -> None:
        self.clock = FakeClock()
        self.pool = Pool(NUM_BLOCKS)
        self.alive = True
        self.transfers: dict[str, Transfer] = {}
        self.sink = Sink({"full": NUM_BLOCKS})
        self.ledger = Ledger(D, P, rank=0, world_size=1, lease_s=LEASE_S, counters=Counter())
        self.faults: list[BaseException] = []
        self.foreign: list[str] = []
        self.end = fabric.transport("decode", self.pool.custody)
        self.end.register(self.pool.memory)
        self.lanes = Lanes({"fabric": self.end}, import_timeout_s, self.faults.append)
        data_peer = self.lanes.connect({"fabric": fabric.ends["prefill"].describe()}, str(P))
        self.link = SimulatedLink(self.ledger, self.clock, producer, data_peer)
        self.importer = Importer(
            self.lanes, self.sink, self.clock, timeout_s=import_timeout_s, on_peer_lost=self.link.lose_data_peer
        )
        self.lanes.start(self.importer)
        self._send = send
        self._renew_at = self.clock()

    def begin(self) -> None:
        """A request is admitted."""
        pull = Pull(new_transfer_id(), self.link, self.importer, self.pool.geometry, self.clock, answer_s=10.0)
        self.transfers[pull.transfer_id] = Transfer(pull)
        self._send(Ask(pull.transfer_id))

    def ready(self) -> list[Transfer]:
        """Transfers that can be read, if there is room."""
        return [
            transfer
            for transfer in self.transfers.values()
            if transfer.source is not None and transfer.reading is None and not transfer.over
        ]

    def read(self, transfer: Transfer) -> None:
        """Read one, if there is room for its pages."""
        assert transfer.source is not None
        needed = len(transfer.source.blocks["full"])
        if needed > len(self.pool.free):
            return
        transfer.blocks = self.pool.take(needed)

        def settled(outcome: ImportOutcome) -> None:
            transfer.outcomes.append(outcome)
            if outcome.outcome == "published" and not self.pool.holds(transfer.blocks, seed_of(outcome.transfer_id)):
                self.foreign.append(outcome.transfer_id)  # an exception here would be the connector's to log
            self.pool.give_back(transfer.blocks)
            transfer.over = True

        transfer.reading = asyncio.ensure_future(
            transfer.pull.read(transfer.source, {"full": transfer.blocks}, settled)
        )

    async def give_up(self, transfer: Transfer) -> None:
        """The client is gone: cancel the call and the read, release the source."""
        if transfer.source is None:
            self._send(CancelCall(transfer.pull.transfer_id))
        if transfer.reading is not None:
            transfer.reading.cancel()
        else:
            transfer.over = True
        await transfer.pull.release("client gone")

    def receive(self, message: Message) -> None:
        """A message has arrived."""
        match message:
            case Answer(transfer_id, source):
                transfer = self.transfers[transfer_id]
                transfer.source = source
                if source is None and not transfer.over:
                    transfer.over = True
                    self.link.acknowledge(transfer_id, "prefill failed")
            case RenewReply():
                for transfer_id in self.ledger.renewed(message):
                    self.importer.source_lost(transfer_id, "the producer says so")
            case AckReply():
                self.ledger.confirmed(message)
            case _:
                raise AssertionError(f"not for a consumer: {message}")

    def speak(self) -> None:
        """What the control connection has to say now."""
        now = self.clock()
        if now >= self._renew_at:
            self._renew_at = now + RENEW_S
            for renewal in self.ledger.renewals(now):
                self._send(renewal)
        for ack in self.ledger.due(now):
            self._send(ack)


def seed_of(transfer_id: str) -> int:
    """The pattern of a transfer's pages."""
    return int(transfer_id[:8], 16)
