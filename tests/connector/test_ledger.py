from __future__ import annotations

from collections import Counter

import pytest

from connector.ledger import Ledger
from connector.wire import MAX_IDS_PER_FRAME, Ack, AckReply, Renew, RenewReply
from tests.connector.pool import D, P

LEASE_S = 30.0


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(D, P, rank=1, world_size=2, lease_s=LEASE_S, counters=Counter())


def reply(renewal: Renew, renewed: list[str], ended: list[str] | None = None) -> RenewReply:
    return RenewReply(consumer=D, producer=P, sequence=renewal.sequence, renewed=renewed, ended=ended or [])


def confirmation(transfer_id: str) -> AckReply:
    return AckReply(consumer=D, producer=P, transfer_id=transfer_id, status="accepted")


def test_a_transfer_is_renewed_from_its_admission_on(ledger: Ledger) -> None:
    ledger.begin("t", 100.0)
    (renewal,) = ledger.renewals(105.0)
    assert (renewal.consumer, renewal.producer, renewal.transfer_ids) == (D, P, ["t"])


def test_only_what_the_reply_confirms_counts_again_and_from_before_it_was_asked(ledger: Ledger) -> None:
    confirmed, unknown = ledger.begin("confirmed", 100.0), ledger.begin("unknown", 100.0)
    (renewal,) = ledger.renewals(105.0)
    assert ledger.renewed(reply(renewal, ["confirmed", "never heard of"])) == []
    assert confirmed.deadline == 105.0 + LEASE_S
    assert unknown.deadline == 100.0 + LEASE_S


def test_a_late_reply_does_not_shorten(ledger: Ledger) -> None:
    lease = ledger.begin("t", 100.0)
    (first,), (second,) = ledger.renewals(105.0), ledger.renewals(110.0)
    ledger.renewed(reply(second, ["t"]))
    ledger.renewed(reply(first, ["t"]))
    assert lease.deadline == 110.0 + LEASE_S


def test_a_reply_that_was_not_asked_for_renews_nothing(ledger: Ledger) -> None:
    lease = ledger.begin("t", 100.0)
    (renewal,) = ledger.renewals(105.0)
    ledger.renewed(reply(renewal, []))
    ledger.renewed(reply(renewal, ["t"]))
    assert lease.deadline == 100.0 + LEASE_S
    assert ledger.counters["renewals_unasked"] == 1


def test_a_source_that_the_producer_has_ended_is_lost_and_needs_no_ack(ledger: Ledger) -> None:
    lease = ledger.begin("t", 100.0)
    (renewal,) = ledger.renewals(105.0)
    assert ledger.renewed(reply(renewal, [], ["t"])) == ["t"]
    assert lease.expired(105.0)
    ledger.ack("t", "failed", 106.0)
    assert ledger.due(106.0) == []


def test_a_consumer_without_transfers_still_shows_that_it_is_alive(ledger: Ledger) -> None:
    (renewal,) = ledger.renewals(100.0)
    assert renewal.transfer_ids == []


def test_many_transfers_take_several_frames(ledger: Ledger) -> None:
    ids = [f"t{number}" for number in range(MAX_IDS_PER_FRAME + 1)]
    for transfer_id in ids:
        ledger.begin(transfer_id, 100.0)
    frames = ledger.renewals(100.0)
    assert [len(frame.transfer_ids) for frame in frames] == [MAX_IDS_PER_FRAME, 1]
    assert [transfer_id for frame in frames for transfer_id in frame.transfer_ids] == ids


def test_an_ack_ends_the_renewals_and_is_sent_once_per_connection(ledger: Ledger) -> None:
    ledger.begin("t", 100.0)
    ledger.ack("t", "published", 101.0)
    ledger.ack("t", "cancelled", 101.0)
    assert ledger.wanted == []
    ack = Ack(consumer=D, producer=P, transfer_id="t", rank=1, world_size=2, outcome="published")
    assert ledger.due(101.0) == [ack]
    assert ledger.due(102.0) == []
    ledger.disconnected()
    assert ledger.due(103.0) == [ack]


def test_a_confirmed_ack_is_never_sent_again(ledger: Ledger) -> None:
    ledger.begin("t", 100.0)
    ledger.ack("t", "published", 101.0)
    ledger.due(101.0)
    assert ledger.is_due("t")
    ledger.confirmed(confirmation("t"))
    assert not ledger.is_due("t")
    ledger.disconnected()
    assert ledger.due(102.0) == []
    ledger.confirmed(confirmation("t"))
    assert ledger.counters["acks_confirmed"] == 1
    assert ledger.counters["acks_confirmed_twice"] == 1


def test_an_ack_is_kept_while_the_producer_can_hold_the_source(ledger: Ledger) -> None:
    ledger.begin("t", 100.0)
    ledger.ack("t", "published", 200.0)
    ledger.disconnected()
    assert len(ledger.due(200.0 + LEASE_S - 0.1)) == 1
    ledger.disconnected()
    assert ledger.due(200.0 + LEASE_S) == []
    assert ledger.unconfirmed == []
    assert ledger.counters["acks_given_up"] == 1


def test_replies_to_a_lost_connections_renewals_count_for_nothing(ledger: Ledger) -> None:
    lease = ledger.begin("t", 100.0)
    (renewal,) = ledger.renewals(105.0)
    ledger.disconnected()
    ledger.renewed(reply(renewal, ["t"]))
    assert lease.deadline == 100.0 + LEASE_S


@pytest.mark.parametrize("transfer_id", ["", "x" * 65])
def test_an_id_that_no_frame_carries_is_refused(ledger: Ledger, transfer_id: str) -> None:
    with pytest.raises(ValueError, match="1 to 64 characters"):
        ledger.begin(transfer_id, 100.0)


def test_an_id_is_begun_once(ledger: Ledger) -> None:
    ledger.begin("t", 100.0)
    with pytest.raises(ValueError, match="has begun already"):
        ledger.begin("t", 100.0)
    ledger.ack("t", "published", 100.0)
    with pytest.raises(ValueError, match="has begun already"):
        ledger.begin("t", 100.0)
