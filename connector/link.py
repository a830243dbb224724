"""The consumer's way to one producer: its control connection and its data peer.

A link is made by a handshake that succeeds, and then looks after itself, as `connector.peer` decides: when the control
connection or the data peer is lost it shakes hands again. What is owed to the producer meanwhile stands in the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable

from connector.connection import LINGER_S, Connection
from connector.dial import Session, dial
from connector.errors import HandshakeError, TransportError, WireError, WrongIncarnationError
from connector.handshake import Identity
from connector.identity import EngineId
from connector.importer import Importer
from connector.imports import PeerKey
from connector.lanes import Lanes
from connector.lease import Lease
from connector.ledger import Ledger
from connector.pages import PoolGeometry
from connector.peer import LOST_AFTER, DialAt, DropControl, Instruction, Peer, PeerState
from connector.ports import Endpoint
from connector.wire import AckReply, Bye, Commit, Failed, Refused, RenewReply, Stopped

logger = logging.getLogger(__name__)

ADDRESSED = (RenewReply, AckReply, Commit, Failed, Stopped)


class _Left(WireError):
    """The peer has said goodbye."""


class Link:
    """One peer. `gb_per_s` is the last measured bandwidth, 0 until there is one.

    Leases are renewed every `renew_s`, or oftener where the producer's are short; a sign of life is asked for every
    `heartbeat_s`; a handshake's answers have to come within `answer_s`. `on_gone` hears that the peer will never come
    back, `on_fault` of a mistake of this worker.
    """

    def __init__(
        self,
        us: Identity,
        peer: EngineId,
        endpoint: Endpoint,
        session: Session,
        lanes: Lanes,
        tls: ssl.SSLContext | None,
        importer: Importer,
        clock: Callable[[], float],
        *,
        renew_s: float,
        heartbeat_s: float,
        answer_s: float,
        counters: Counter[str],
        on_gone: Callable[[Link], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.transport = session.data_peer[0]
        self.geometry: PoolGeometry = session.record.geometry
        self.gb_per_s = 0.0
        self.ledger = Ledger(
            us.engine_id,
            peer,
            rank=us.record.compatibility.tp_rank,
            world_size=us.record.compatibility.tp_size,
            lease_s=session.record.lease_s,
            counters=counters,
        )
        self._us = us
        self._connection: Connection | None = session.connection
        self._data_peer: PeerKey | None = session.data_peer
        self._reached_by: PeerKey = session.data_peer
        self._lanes = lanes
        self._tls = tls
        self._importer = importer
        self._clock = clock
        self._renew_s = min(renew_s, session.record.lease_s / 3)
        self._heartbeat_s = min(heartbeat_s, self._renew_s)
        self._state = Peer(str(peer), clock())
        self._answer_s = answer_s
        self._on_gone = on_gone
        self._on_fault = on_fault
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._confirmations: dict[str, asyncio.Future[None]] = {}

    @property
    def name(self) -> str:
        """The peer's name."""
        return self.peer.name

    @property
    def connected(self) -> bool:
        """Whether it answers, and pages can be had of it, at this moment: whether it may be given new work."""
        return self._state.usable and self._connection is not None and self._data_peer is not None

    @property
    def gone(self) -> bool:
        """Whether it will never come back."""
        return self._state.state is PeerState.GONE

    @property
    def data_peer(self) -> PeerKey | None:
        """How the transport calls the peer; None while it cannot be read from."""
        return self._data_peer

    # What a transfer needs

    def begin(self, transfer_id: str) -> Lease:
        """Renew the lease of this transfer from now on."""
        return self.ledger.begin(transfer_id, self._clock())

    def acknowledge(self, transfer_id: str, outcome: str) -> None:
        """Stop renewing and owe an ACK, which is delivered in the background."""
        self.ledger.ack(transfer_id, outcome, self._clock())
        self._wake.set()

    def stop_writing(self, transfer_id: str) -> None:
        """Ask the producer to stop, again and again, until the transfer is acknowledged."""
        self.ledger.cancel(transfer_id)
        self._wake.set()

    async def confirmed(self, transfer_id: str, timeout_s: float) -> bool:
        """Wait until the producer has confirmed the ACK, if it is connected; False if it has not."""
        if self.ledger.is_due(transfer_id) and self._connection is not None:
            waiting = self._confirmations.setdefault(transfer_id, asyncio.get_running_loop().create_future())
            await asyncio.wait({waiting}, timeout=timeout_s)
        return not self.ledger.is_due(transfer_id)

    # Its life

    def start(self) -> None:
        """Begin to look after the link."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"link to {self.peer}")
        self._task.add_done_callback(self._ended)

    def data_lost(self, cause: str) -> None:
        """The data peer has been fenced: shake hands again, and connect anew."""
        self._data_peer = None
        self._carry_out(self._state.data_lost(cause))

    def process_ended(self, cause: str) -> None:
        """The peer's process is known to have ended: nothing of it is written any more, and it will not come back."""
        self._state.gone(cause, self._clock())
        self._fence(cause)
        self._importer.gone(self._reached_by, cause)

    async def close(self) -> None:
        """Settle what is in flight, release what is wanted, deliver the ACKs if the producer listens, say goodbye.

        Closing twice is harmless, and a caller that is cancelled does not stop it half-way.
        """
        if self._closing is None:
            name = f"closing the link to {self.peer}"
            self._closing = asyncio.get_running_loop().create_task(self._close(), name=name)
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._state.gone("the link was closed", self._clock())
        writes = self._importer.stop_writes(self._reached_by)
        if writes and self._connection is not None:
            await asyncio.wait(writes, timeout=self._answer_s)
        if all(write.done() for write in writes):
            data_peer = self._data_peer
            self._fence("the link was closed")
            if data_peer is not None:
                await self._lanes.fenced(data_peer)
        else:  # still connected, the transport will tell when its process has ended
            logger.warning(
                "%s may still write: %d imports keep their blocks until it has ended", self.peer, len(writes)
            )
            self._data_peer = None
        for transfer_id in self.ledger.wanted:
            self.acknowledge(transfer_id, "closed")
        await asyncio.gather(*(self.confirmed(transfer_id, LINGER_S) for transfer_id in self.ledger.unconfirmed))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._connection is not None:
            await self._connection.say_last(Bye(reason="closing"))
            self._connection = None

    def _fence(self, cause: str) -> None:
        data_peer, self._data_peer = self._data_peer, None
        if data_peer is not None:
            self._importer.fence(data_peer, cause)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(error)

    async def _run(self) -> None:
        while (connection := self._connection) is not None:
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._speak(connection))
                    both.create_task(self._listen(connection))
            except* (WireError, HandshakeError) as lost:
                error = lost.exceptions[0]
                level = logging.INFO if isinstance(error, _Left) else logging.WARNING
                logger.log(level, "the control connection to %s is lost: %s", self.peer, error)
                cause = str(error)
            self._connection = None
            self.ledger.disconnected()
            self._settle_confirmations(every=True)
            await connection.close()
            if self.gone:  # a cancellation that met a lost connection is swallowed by the task group
                return
            self._connection = await self._connect_again(self._state.lost(cause, self._clock()))

    async def _connect_again(self, instructions: list[Instruction]) -> Connection | None:
        while instructions:
            (dial_at,) = instructions
            assert isinstance(dial_at, DialAt)
            await asyncio.sleep(max(dial_at.when - self._clock(), 0))
            self._state.dialling(self._clock())
            try:
                session = await dial(
                    self._us, self.peer, self.endpoint, self._lanes, self._data_peer, self._answer_s, self._tls
                )
            except WrongIncarnationError as error:
                logger.warning("%s", error)
                self.process_ended(str(error))
                self._on_gone(self)
                return None
            except (HandshakeError, TransportError) as error:
                logger.warning("no link to %s yet: %s", self.peer, error)
                instructions = self._state.refused(str(error), self._clock())
            else:
                self._state.linked(self._clock())
                self._importer.moved(self._reached_by, session.data_peer)
                self._data_peer = self._reached_by = session.data_peer
                self.transport = session.data_peer[0]
                logger.info("linked to %s again, pages by %s", self.peer, self.transport)
                return session.connection
        return None

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, DropControl) and self._connection is not None:
                logger.warning("shaking hands with %s again: %s", self.peer, instruction.cause)
                self._connection.abort()

    async def _speak(self, connection: Connection) -> None:
        renew_at = self._clock()
        while True:
            now = self._clock()
            self._carry_out(self._state.asked(now))
            if now >= renew_at:
                renew_at = now + self._renew_s
                for renewal in self.ledger.renewals(now):
                    await connection.send(renewal, self._answer_s)
            else:
                await connection.send(self.ledger.heartbeat(now), self._answer_s)
            await self._speak_until(connection, min(renew_at, now + self._heartbeat_s))

    async def _speak_until(self, connection: Connection, when: float) -> None:
        """Send what comes up until then."""
        while True:
            for frame in self.ledger.due(self._clock()):
                await connection.send(frame, self._answer_s)
            self._settle_confirmations()
            try:
                async with asyncio.timeout(max(when - self._clock(), 0)):
                    await self._wake.wait()
            except TimeoutError:
                return
            self._wake.clear()

    async def _listen(self, connection: Connection) -> None:
        while True:
            frame = await connection.receive(LOST_AFTER * self._heartbeat_s + self._answer_s)
            self._state.heard(self._clock())
            if isinstance(frame, ADDRESSED) and (frame.consumer, frame.producer) != (self._us.engine_id, self.peer):
                raise WireError(f"{self.peer} spoke for {frame.producer} to {frame.consumer}")
            match frame:
                case RenewReply():
                    for transfer_id in self.ledger.renewed(frame):
                        self._importer.source_lost(transfer_id, f"{self.peer} says that the source has ended")
                case AckReply():
                    self.ledger.confirmed(frame)
                    self._settle_confirmations()
                case Commit():
                    self._importer.committed(frame.transfer_id)
                case Failed():
                    self._importer.not_written(frame.transfer_id, frame.detail)
                case Stopped():
                    self._importer.not_written(frame.transfer_id, "the producer has stopped")
                case Bye():
                    raise _Left(f"it is leaving ({frame.reason})")
                case Refused():
                    raise HandshakeError(f"it refused ({frame.reason}): {frame.detail}")
                case _:
                    raise WireError(f"it sent a {type(frame).__name__}, which is not a producer's to send now")

    def _settle_confirmations(self, every: bool = False) -> None:
        for transfer_id, waiting in list(self._confirmations.items()):
            if every or not self.ledger.is_due(transfer_id):
                del self._confirmations[transfer_id]
                waiting.set_result(None)
