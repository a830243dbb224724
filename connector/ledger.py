"""What a consumer owes one producer: renewals for the transfers it wants, and an ACK for each it is done with.

A plain object, like the state machines: times and replies come in, frames go out. An ACK is kept until the producer has
confirmed it, and is due again after a reconnection, for as long as the producer can still hold the source: its lease
ends `lease_s` after the last renewal, and none is sent after the ACK.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from connector.identity import EngineId
from connector.lease import Lease
from connector.wire import MAX_ID_LENGTH, MAX_IDS_PER_FRAME, Ack, AckReply, Cancel, Renew, RenewReply


class _Due(msgspec.Struct):
    ack: Ack
    useful_until: float
    sent: bool = False


class Ledger:
    """`rank` of `world_size` ranks of this consumer read from the producer, whose leases last `lease_s`."""

    def __init__(
        self,
        us: EngineId,
        producer: EngineId,
        *,
        rank: int,
        world_size: int,
        lease_s: float,
        counters: Counter[str],
    ) -> None:
        self.counters = counters
        self._us = us
        self._producer = producer
        self._rank = rank
        self._world_size = world_size
        self._lease_s = lease_s
        self._leases: dict[str, Lease] = {}
        self._due: dict[str, _Due] = {}
        self._cancels: dict[str, bool] = {}
        self._sequence = 0
        self._asked_at: dict[int, float] = {}

    @property
    def wanted(self) -> list[str]:
        """Transfers whose leases are being renewed."""
        return list(self._leases)

    @property
    def unconfirmed(self) -> list[str]:
        """Transfers whose ACK the producer has not confirmed."""
        return list(self._due)

    def begin(self, transfer_id: str, now: float) -> Lease:
        """Admission of a transfer, before the producer is asked for anything.

        Raises:
            ValueError: the id is in use, or no id.
        """
        if not 0 < len(transfer_id) <= MAX_ID_LENGTH:
            raise ValueError(f"a transfer id has 1 to {MAX_ID_LENGTH} characters, this one has {len(transfer_id)}")
        if transfer_id in self._leases or transfer_id in self._due:
            raise ValueError(f"transfer {transfer_id} has begun already; a retry needs a new id")
        lease = self._leases[transfer_id] = Lease(now, self._lease_s)
        return lease

    def renewals(self, now: float) -> list[Renew]:
        """Frames that renew every lease; at least one, so that the producer sees that this consumer is alive. What was
        cancelled and not answered is cancelled again."""
        self._ask_again()
        frames = []
        for ids in _chunks(self.wanted):
            self._sequence += 1
            self._asked_at[self._sequence] = now
            frames.append(Renew(consumer=self._us, producer=self._producer, sequence=self._sequence, transfer_ids=ids))
        return frames

    def heartbeat(self, now: float) -> Renew:
        """A frame that renews nothing: it asks the producer for a sign of life, and gives it one."""
        self._sequence += 1
        self._asked_at[self._sequence] = now
        return Renew(consumer=self._us, producer=self._producer, sequence=self._sequence, transfer_ids=[])

    def renewed(self, reply: RenewReply) -> list[str]:
        """Count leases again from when they were asked for. Returns the transfers whose source has ended."""
        asked_at = self._asked_at.pop(reply.sequence, None)
        if asked_at is None:
            self.counters["renewals_unasked"] += 1
            return []
        for transfer_id in reply.renewed:
            if lease := self._leases.get(transfer_id):
                lease.renew(asked_at)
        ended = [transfer_id for transfer_id in reply.ended if transfer_id in self._leases]
        for transfer_id in ended:
            self._leases.pop(transfer_id).end()
        self.counters["sources_ended_early"] += len(ended)
        return ended

    def ack(self, transfer_id: str, outcome: str, now: float) -> None:
        """The blocks are not needed any more: stop renewing, and owe an ACK. Does nothing when it is owed already, or
        when the producer has said that the source has ended."""
        self._cancels.pop(transfer_id, None)
        if self._leases.pop(transfer_id, None) is None:
            return
        ack = Ack(
            consumer=self._us,
            producer=self._producer,
            transfer_id=transfer_id,
            rank=self._rank,
            world_size=self._world_size,
            outcome=outcome[:MAX_ID_LENGTH],
        )
        self._due[transfer_id] = _Due(ack, now + self._lease_s)
        self.counters["acks_owed"] += 1

    def cancel(self, transfer_id: str) -> None:
        """Ask the producer to stop writing, again with each renewal, until the transfer is acknowledged."""
        self._cancels.setdefault(transfer_id, False)

    def due(self, now: float) -> list[Ack | Cancel]:
        """What to send on this connection; ACKs that can change nothing any more are dropped."""
        for transfer_id, due in list(self._due.items()):
            if now >= due.useful_until:
                del self._due[transfer_id]
                self.counters["acks_given_up"] += 1
        frames: list[Ack | Cancel] = [due.ack for due in self._due.values() if not due.sent]
        for due in self._due.values():
            due.sent = True
        for transfer_id, sent in self._cancels.items():
            if not sent:
                frames.append(Cancel(consumer=self._us, producer=self._producer, transfer_id=transfer_id))
                self._cancels[transfer_id] = True
        return frames

    def confirmed(self, reply: AckReply) -> None:
        """The producer has the ACK."""
        if self._due.pop(reply.transfer_id, None) is None:
            self.counters["acks_confirmed_twice"] += 1
        else:
            self.counters["acks_confirmed"] += 1

    def is_due(self, transfer_id: str) -> bool:
        """Whether the ACK of this transfer is still owed."""
        return transfer_id in self._due

    def disconnected(self) -> None:
        """Nothing that was on its way counts; unconfirmed ACKs are due again."""
        self._asked_at.clear()
        for due in self._due.values():
            due.sent = False
        self._ask_again()

    def _ask_again(self) -> None:
        self._cancels = dict.fromkeys(self._cancels, False)


def _chunks(ids: list[str]) -> list[list[str]]:
    return [ids[at : at + MAX_IDS_PER_FRAME] for at in range(0, max(len(ids), 1), MAX_IDS_PER_FRAME)]
