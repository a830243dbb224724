"""The two workers of the simulation: the real state machines and what carries them out, without sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import msgspec

from connector import (
    ConnectorError,
    DestinationRef,
    EngineId,
    Imported,
    ImportOutcome,
    Pull,
    Receive,
    SourceEnd,
    SourceRef,
    Sources,
    new_transfer_id,
)
from connector.consumers import Consumers
from connector.importer import Importer
from connector.imports import PeerKey
from connector.lanes import Lanes
from connector.lease import Lease
from connector.ledger import Ledger
from connector.link import Link
from connector.sink import Sink
from connector.wire import Ack, AckReply, Cancel, Commit, Failed, Frame, Record, Renew, RenewReply, Stopped
from tests.clock import FakeClock
from tests.connector.fabric import Fabric
from tests.connector.pool import BLOCK_SIZE, D, Pool, compatibility

LEASE_S, RENEW_S = 30.0, 5.0
EPOCH_GAP_S = 1e6
NUM_BLOCKS = 8
NUM_LAYERS = 3
BATCH_S = 1e9
"""The fabric has no clock: what is late is the script's to say."""

Mode: TypeAlias = Literal["read", "write"]


class Ask(msgspec.Struct, frozen=True):
    """The `Prefill` call."""

    transfer_id: str
    producer: EngineId
    destination: DestinationRef | None


class CancelCall(msgspec.Struct, frozen=True):
    """The `Prefill` call is cancelled."""

    transfer_id: str
    producer: EngineId


class Answer(msgspec.Struct, frozen=True):
    """The `Prefill` call's answer: whether it was computed, and where the pages are unless they are written."""

    transfer_id: str
    producer: EngineId
    source: SourceRef | None
    computed: bool


Message: TypeAlias = Ask | CancelCall | Answer | Frame
CALL = (Ask, CancelCall, Answer)
"""What travels by gRPC: delivered once, or not at all. The rest is the control connection's."""


class _Computing:
    """A prompt on its way through the forward pass."""

    def __init__(self, transfer_id: str, destination: DestinationRef | None) -> None:
        self.transfer_id = transfer_id
        self.destination = destination
        self.next_layer = 0
        self.num_tokens = 0


class Producer:
    """The prefill side, of one incarnation."""

    def __init__(self, fabric: Fabric, engine_id: EngineId, send: Callable[[Message], None]) -> None:
        self.engine_id = engine_id
        self.clock = FakeClock(EPOCH_GAP_S)
        self.pool = Pool(NUM_BLOCKS)
        self.alive = True
        self.faults: list[BaseException] = []
        self.computing: list[_Computing] = []
        self.blocks: dict[str, list[int]] = {}
        self.ends: Counter[str] = Counter()
        self.expired: list[str] = []
        self.end = fabric.transport(str(engine_id), self.pool.custody)
        self.end.register(self.pool.memory)
        self.lanes = Lanes({"fabric": self.end}, BATCH_S, self.faults.append)
        self.consumers = Consumers(self.lanes)
        self.sources = Sources(engine_id, self.pool.geometry, LEASE_S, self.clock)
        self.table = self.sources._table
        self.lanes.start(self.sources.attach(self.lanes, self.consumers))
        self._send = send

    def connected(self, record: Record) -> None:
        """The consumer's control connection is there, again."""
        self.consumers.arrived(D, record, cast(Any, _Line(self._send)))
        for notice in self.sources.notices(D):
            self._send(notice)

    def compute(self, at: int, num_tokens: int) -> None:
        """A step of one of the prompts. A prompt that is read is computed at once, or there is no room for it."""
        prompt = self.computing[at % len(self.computing)]
        if prompt.destination is not None:
            self._compute_layer(prompt, prompt.destination, num_tokens)
            return
        self.computing.remove(prompt)
        transfer_id, needed = prompt.transfer_id, -(-num_tokens // BLOCK_SIZE)
        if needed > len(self.pool.free):
            self.sources.fail(transfer_id, "no free blocks")
            self._answer(transfer_id, None, computed=False)
            return
        self.blocks[transfer_id] = blocks = self.pool.take(needed)
        self.pool.fill(blocks, seed_of(transfer_id))
        self._answer(transfer_id, self.sources.hold(transfer_id, {"full": blocks}, num_tokens), computed=True)

    def fail(self, at: int) -> None:
        """The forward pass of one of the prompts has failed."""
        transfer_id = self.computing[at % len(self.computing)].transfer_id
        self.sources.fail(transfer_id, "a step failed")
        self._answer(transfer_id, None, computed=False)

    def receive(self, message: Message) -> None:
        """A message has arrived, for this incarnation or another one."""
        if message.producer != self.engine_id:  # type: ignore[union-attr]
            return
        match message:
            case Ask(transfer_id, _, destination):
                self._open(transfer_id, destination)
            case CancelCall(transfer_id):
                if any(prompt.transfer_id == transfer_id for prompt in self.computing):
                    self.sources.fail(transfer_id, "the call was cancelled")
            case Renew():
                statuses = {id_: self.sources.renew(id_, message.consumer) for id_ in message.transfer_ids}
                renewed = [id_ for id_, status in statuses.items() if status == "renewed"]
                ended = [id_ for id_, status in statuses.items() if status == "ended"]
                reply = RenewReply(
                    consumer=D,
                    producer=self.engine_id,
                    sequence=message.sequence,
                    renewed=renewed,
                    ended=ended,
                )
                self._send(reply)
            case Ack():
                status = self.sources.ack(
                    message.transfer_id, message.consumer, message.rank, message.world_size, message.outcome
                )
                id_ = message.transfer_id
                self._send(AckReply(consumer=D, producer=self.engine_id, transfer_id=id_, status=status))
            case Cancel():
                self.sources.cancel(message.transfer_id, message.consumer)
            case _:
                raise AssertionError(f"not for a producer: {message}")

    def _open(self, transfer_id: str, destination: DestinationRef | None) -> None:
        def on_end(end: SourceEnd) -> None:
            self.ends[transfer_id] += 1
            if end.outcome == "expired":
                self.expired.append(transfer_id)
            self.computing[:] = [prompt for prompt in self.computing if prompt.transfer_id != transfer_id]
            self.pool.give_back(self.blocks.pop(transfer_id, []))

        try:
            if destination is None:
                self.sources.open(transfer_id, D, on_end)
            else:
                needed = -(-destination.num_tokens // BLOCK_SIZE)
                self.sources.open_write(destination, on_end, lambda detail: self._stop(transfer_id))
                if needed > len(self.pool.free):
                    self.sources.fail(transfer_id, "no free blocks")
                    self._answer(transfer_id, None, computed=False)
                    return
                self.blocks[transfer_id] = blocks = self.pool.take(needed)
                self.pool.fill(blocks, seed_of(transfer_id))
        except ConnectorError:
            self._answer(transfer_id, None, computed=False)
        else:
            self.computing.append(_Computing(transfer_id, destination))

    def _stop(self, transfer_id: str) -> None:
        self.computing[:] = [prompt for prompt in self.computing if prompt.transfer_id != transfer_id]
        self._answer(transfer_id, None, computed=False)

    def _compute_layer(self, prompt: _Computing, destination: DestinationRef, num_tokens: int) -> None:
        """One layer of one chunk; a chunk begins with layer 0."""
        if prompt.next_layer == 0:
            prompt.num_tokens = min(prompt.num_tokens + num_tokens, destination.num_tokens)
        blocks = {"full": self.blocks[prompt.transfer_id]}
        self.sources.computed(prompt.transfer_id, blocks, prompt.next_layer, prompt.num_tokens)
        prompt.next_layer = (prompt.next_layer + 1) % NUM_LAYERS
        if prompt in self.computing and prompt.next_layer == 0 and prompt.num_tokens == destination.num_tokens:
            self.computing.remove(prompt)
            self._answer(prompt.transfer_id, None, computed=True)
            self.sources.finish(prompt.transfer_id)

    def _answer(self, transfer_id: str, source: SourceRef | None, *, computed: bool) -> None:
        self._send(Answer(transfer_id, self.engine_id, source, computed))


class _Line:
    """What a producer needs of a control connection."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.say = send

    def abort(self) -> None:
        """Its other end hears of it in time."""


class SimulatedLink(Link):
    """What a transfer needs of a link: the ledger and the data peer, and a network that is not its business."""

    def __init__(self, peer: EngineId, ledger: Ledger, clock: FakeClock, pool: Pool, data_peer: PeerKey) -> None:
        self.peer = peer
        self.geometry = pool.geometry
        self.ledger = ledger
        self._clock = clock
        self._data_peer = self._reached_by = data_peer
        self._wake = asyncio.Event()
        self._connection = None

    def lose_data_peer(self) -> None:
        """It has been fenced; there is no other one in this world."""
        self._data_peer = None

    def begin(self, transfer_id: str) -> Lease:
        """See `Link`."""
        return self.ledger.begin(transfer_id, self._clock())


class Transfer:
    """One request as the decode side sees it."""

    def __init__(self, transfer_id: str, producer: EngineId) -> None:
        self.transfer_id = transfer_id
        self.producer = producer
        self.pull: Pull | None = None
        self.receive: Receive | None = None
        self.source: SourceRef | None = None
        self.blocks: list[int] = []
        self.outcomes: list[ImportOutcome] = []
        self.waiting: asyncio.Future[Imported] | None = None
        self.answered = False
        self.over = False


class Consumer:
    """The decode side."""

    def __init__(self, fabric: Fabric, mode: Mode, send: Callable[[Message], None], import_timeout_s: float) -> None:
        self.clock = FakeClock()
        self.pool = Pool(NUM_BLOCKS)
        self.alive = True
        self.mode = mode
        self.transfers: dict[str, Transfer] = {}
        self.sink = Sink({"full": NUM_BLOCKS})
        self.counters: Counter[str] = Counter()
        self.faults: list[BaseException] = []
        self.foreign: list[str] = []
        self.end = fabric.transport(str(D), self.pool.custody)
        self.end.register(self.pool.memory)
        self.lanes = Lanes({"fabric": self.end}, BATCH_S, self.faults.append)
        self.importer = Importer(
            self.lanes, self.sink, self.clock, timeout_s=import_timeout_s, on_peer_lost=self._peer_lost
        )
        self.lanes.start(self.importer)
        self.record = Record(
            compatibility=compatibility(),
            geometry=self.pool.geometry,
            lease_s=LEASE_S,
            transports={"fabric": self.end.describe()},
        )
        self.link: SimulatedLink
        self._send = send
        self._renew_at = self.clock()

    def connect(self, producer: Producer) -> None:
        """Link to a producer; one that was linked to before is gone."""
        data_peer = self.lanes.connect({"fabric": producer.end.describe()}, str(producer.engine_id))
        ledger = Ledger(D, producer.engine_id, rank=0, world_size=1, lease_s=LEASE_S, counters=self.counters)
        self.link = SimulatedLink(producer.engine_id, ledger, self.clock, producer.pool, data_peer)

    @property
    def ledger(self) -> Ledger:
        """What is owed to the producer."""
        return self.link.ledger

    def begin(self, num_tokens: int) -> None:
        """A request is admitted, if there is room for what is written."""
        transfer = Transfer(new_transfer_id(), self.link.peer)
        destination = None
        if self.mode == "read":
            transfer.pull = Pull(
                transfer.transfer_id, self.link, self.importer, self.pool.geometry, self.clock, answer_s=10.0
            )
        else:
            needed = -(-num_tokens // BLOCK_SIZE)
            if needed > len(self.pool.free) or self.link.data_peer is None:
                return
            transfer.blocks = self.pool.take(needed)
            destination = DestinationRef(
                transfer_id=transfer.transfer_id,
                consumer=D,
                blocks={"full": transfer.blocks},
                num_tokens=num_tokens,
            )
            transfer.receive = Receive(
                destination, self.link, self.importer, self.pool.geometry, self.clock, self._settler(transfer)
            )
        self.transfers[transfer.transfer_id] = transfer
        self._send(Ask(transfer.transfer_id, self.link.peer, destination))

    def ready(self) -> list[Transfer]:
        """Transfers that can be read, if there is room."""
        return [
            transfer
            for transfer in self.transfers.values()
            if transfer.source is not None and transfer.waiting is None and not transfer.over
        ]

    def read(self, transfer: Transfer) -> None:
        """Read one, if there is room for its pages."""
        assert transfer.source is not None
        assert transfer.pull is not None
        needed = len(transfer.source.blocks["full"])
        if needed > len(self.pool.free):
            return
        transfer.blocks = self.pool.take(needed)
        transfer.waiting = asyncio.ensure_future(
            transfer.pull.read(transfer.source, {"full": transfer.blocks}, self._settler(transfer))
        )

    async def give_up(self, transfer: Transfer) -> None:
        """The client is gone: cancel the call and the wait, let the producer go."""
        if not transfer.answered:
            self._send(CancelCall(transfer.transfer_id, transfer.producer))
        if transfer.waiting is not None:
            transfer.waiting.cancel()
        if transfer.receive is not None:
            transfer.receive.cancel()
            return
        assert transfer.pull is not None
        transfer.over = transfer.over or transfer.waiting is None
        await transfer.pull.release("client gone")

    def receive(self, message: Message) -> None:
        """A message has arrived, of the producer that is linked to or of an earlier one."""
        if message.producer != self.link.peer:  # type: ignore[union-attr]
            return
        match message:
            case Answer():
                self._answered(self.transfers[message.transfer_id], message)
            case RenewReply():
                for transfer_id in self.ledger.renewed(message):
                    self.importer.source_lost(transfer_id, "the producer says so")
            case AckReply():
                self.ledger.confirmed(message)
            case Commit():
                self.importer.committed(message.transfer_id)
            case Failed():
                self.importer.not_written(message.transfer_id, message.detail)
            case Stopped():
                self.importer.not_written(message.transfer_id, "stopped")
            case _:
                raise AssertionError(f"not for a consumer: {message}")

    def speak(self) -> None:
        """What the control connection has to say now."""
        now = self.clock()
        if now >= self._renew_at:
            self._renew_at = now + RENEW_S
            for renewal in self.ledger.renewals(now):
                self._send(renewal)
        for frame in self.ledger.due(now):
            self._send(frame)

    def producer_ended(self) -> None:
        """Its process is known to have ended."""
        self.lanes.fence(self.link._reached_by, "its process has ended")
        self.importer.gone(self.link._reached_by, "its process has ended")

    def _answered(self, transfer: Transfer, answer: Answer) -> None:
        transfer.answered = True
        transfer.source = answer.source
        if transfer.receive is not None:
            if not answer.computed:
                transfer.receive.cancel()
            elif not transfer.over:
                transfer.waiting = asyncio.ensure_future(transfer.receive.landed())
        elif answer.source is None and not transfer.over:
            transfer.over = True
            self.link.acknowledge(transfer.transfer_id, "prefill failed")

    def _settler(self, transfer: Transfer) -> Callable[[ImportOutcome], None]:
        def settled(outcome: ImportOutcome) -> None:
            transfer.outcomes.append(outcome)
            if outcome.outcome == "published" and not self.pool.holds(transfer.blocks, seed_of(outcome.transfer_id)):
                self.foreign.append(outcome.transfer_id)  # an exception here would be the connector's to log
            self.pool.give_back(transfer.blocks)
            transfer.over = True

        return settled

    def _peer_lost(self, peer: PeerKey, cause: str) -> None:
        if self.link.data_peer == peer:
            self.link.lose_data_peer()


def seed_of(transfer_id: str) -> int:
    """The pattern of a transfer's pages."""
    return int(transfer_id[:8], 16)
