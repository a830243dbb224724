"""Every edge of the source's state machine, and every event that must change nothing."""

from __future__ import annotations

import pytest

from connector import EngineId, InvalidTransition
from connector.source import AckStatus, Ended, Instruction, LongHeld, SourceState
from connector.source_table import SourceTable

CONSUMER = EngineId("decode-0", 1)
RESTARTED = EngineId("decode-0", 2)
LEASE_S = 30.0


class Table:
    """A table on a hand-set clock that is validated after every event."""

    def __init__(self, **bounds: int) -> None:
        self.now = 100.0
        self.table = SourceTable(LEASE_S, warn_after_s=60.0, **bounds)

    def open(self, transfer_id: str, consumer: EngineId = CONSUMER) -> None:
        self.table.open(transfer_id, consumer, self.now)
        self.table.validate()

    def hold(self, transfer_id: str) -> None:
        self.table.hold(transfer_id, 3, self.now)
        self.table.validate()

    def fail(self, transfer_id: str, detail: str = "no memory") -> list[Instruction]:
        instructions = self.table.fail(transfer_id, detail, self.now)
        self.table.validate()
        return instructions

    def renew(self, transfer_id: str, consumer: EngineId = CONSUMER) -> str:
        status = self.table.renew(transfer_id, consumer, self.now)
        self.table.validate()
        return status

    def ack(
        self, transfer_id: str, rank: int = 0, world_size: int = 1, consumer: EngineId = CONSUMER
    ) -> tuple[AckStatus, list[Instruction]]:
        answer = self.table.ack(transfer_id, consumer, rank, world_size, "published", self.now)
        self.table.validate()
        return answer

    def reap_after(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        instructions = self.table.reap(self.now)
        self.table.validate()
        return instructions

    def count(self, counter: str) -> int:
        return self.table.counters[counter]


@pytest.fixture
def table() -> Table:
    return Table()


def held(table: Table, transfer_id: str = "t") -> None:
    table.open(transfer_id)
    table.hold(transfer_id)


# The edges


def test_open_starts_computing(table: Table) -> None:
    table.open("t")
    assert table.table.state("t") is SourceState.COMPUTING
    assert (table.table.active, table.table.held) == (1, 0)


def test_hold_makes_it_held(table: Table) -> None:
    held(table)
    assert table.table.state("t") is SourceState.HELD
    assert (table.table.active, table.table.held) == (1, 1)


def test_the_ack_releases_a_held_source(table: Table) -> None:
    held(table)
    table.now += 2.5
    assert table.ack("t") == ("accepted", [Ended("t", "released", "published", 2.5)])
    assert table.table.state("t") is SourceState.RELEASED
    assert table.table.active == 0


def test_a_lease_that_nobody_renews_expires_a_held_source(table: Table) -> None:
    held(table)
    assert table.reap_after(LEASE_S - 0.001) == []
    (ended,) = table.reap_after(0.001)
    assert isinstance(ended, Ended)
    assert ended.outcome == "expired"
    assert ended.age_s == pytest.approx(LEASE_S)
    assert str(CONSUMER) in ended.detail
    assert table.table.state("t") is SourceState.EXPIRED
    assert table.count("leases_expired_held") == 1


def test_a_lease_that_nobody_renews_stops_a_computation(table: Table) -> None:
    table.open("t")
    (ended,) = table.reap_after(LEASE_S)
    assert isinstance(ended, Ended)
    assert ended.outcome == "failed"
    assert table.table.state("t") is SourceState.FAILED
    assert table.count("leases_expired_computing") == 1


def test_a_producer_that_cannot_compute_fails_the_source(table: Table) -> None:
    table.open("t")
    assert table.fail("t", "no memory") == [Ended("t", "failed", "no memory", 0.0)]
    assert table.table.state("t") is SourceState.FAILED


def test_closing_ends_everything_once(table: Table) -> None:
    table.open("computing")
    held(table, "held")
    ends = [(end.transfer_id, end.outcome) for end in table.table.close(table.now) if isinstance(end, Ended)]
    table.table.validate()
    assert ends == [("computing", "failed"), ("held", "expired")]
    assert table.table.close(table.now) == []


# What cannot happen


def test_an_id_is_used_once(table: Table) -> None:
    table.open("t")
    with pytest.raises(InvalidTransition, match="already computing"):
        table.open("t")
    table.hold("t")
    with pytest.raises(InvalidTransition, match="already held"):
        table.open("t")
    table.ack("t")
    with pytest.raises(InvalidTransition, match="a retry needs a new id"):
        table.open("t")


def test_holding_twice_tells_the_story(table: Table) -> None:
    held(table)
    with pytest.raises(InvalidTransition, match=r"is held, not to become held: opened by decode-0@.*held 3 blocks"):
        table.hold("t")


def test_holding_after_the_end_tells_the_story(table: Table) -> None:
    table.open("t")
    table.reap_after(LEASE_S)
    with pytest.raises(InvalidTransition, match=r"it is failed: opened by .* has not renewed"):
        table.hold("t")


def test_holding_an_unknown_transfer_is_refused(table: Table) -> None:
    with pytest.raises(InvalidTransition, match="was never opened"):
        table.hold("t")


def test_a_held_source_cannot_fail(table: Table) -> None:
    held(table)
    with pytest.raises(InvalidTransition, match="is held, not to become failed"):
        table.fail("t")
    assert table.table.state("t") is SourceState.HELD


def test_failing_twice_changes_nothing(table: Table) -> None:
    table.open("t")
    table.fail("t")
    assert table.fail("t") == []
    assert table.count("sources_failed") == 1


# ACKs


def test_a_source_waits_for_every_distinct_rank(table: Table) -> None:
    held(table)
    assert table.ack("t", rank=1, world_size=3) == ("accepted", [])
    assert table.ack("t", rank=1, world_size=3) == ("duplicate", [])
    assert table.ack("t", rank=0, world_size=3) == ("accepted", [])
    assert table.table.state("t") is SourceState.HELD
    status, instructions = table.ack("t", rank=2, world_size=3)
    assert (status, len(instructions)) == ("accepted", 1)
    assert table.count("acks_duplicate") == 1


def test_an_ack_after_the_release_is_a_duplicate(table: Table) -> None:
    held(table)
    table.ack("t")
    assert table.ack("t") == ("duplicate", [])
    assert table.count("sources_released") == 1


def test_an_ack_after_the_expiry_is_stale(table: Table) -> None:
    held(table)
    table.reap_after(LEASE_S)
    assert table.ack("t") == ("stale", [])
    assert table.table.state("t") is SourceState.EXPIRED


def test_an_ack_of_another_incarnation_is_stale(table: Table) -> None:
    held(table)
    assert table.ack("t", consumer=RESTARTED) == ("stale", [])
    assert table.table.state("t") is SourceState.HELD
    assert table.count("acks_stale") == 1


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0), (0, 1 << 40)])
def test_an_impossible_rank_is_invalid(table: Table, rank: int, world_size: int) -> None:
    held(table)
    assert table.ack("t", rank=rank, world_size=world_size) == ("invalid", [])
    assert table.table.state("t") is SourceState.HELD


def test_ranks_that_disagree_on_their_number_are_invalid(table: Table) -> None:
    held(table)
    table.ack("t", rank=0, world_size=2)
    assert table.ack("t", rank=1, world_size=1) == ("invalid", [])
    assert table.table.state("t") is SourceState.HELD


def test_the_last_ack_stops_a_computation(table: Table) -> None:
    table.open("t")
    status, (ended,) = table.ack("t")
    assert status == "accepted"
    assert isinstance(ended, Ended)
    assert ended.outcome == "failed"
    assert "given up by the consumer" in ended.detail
    with pytest.raises(InvalidTransition):
        table.hold("t")


def test_some_ranks_that_give_up_do_not_stop_the_computation(table: Table) -> None:
    table.open("t")
    assert table.ack("t", rank=0, world_size=2) == ("accepted", [])
    table.hold("t")
    status, instructions = table.ack("t", rank=1, world_size=2)
    assert (status, len(instructions)) == ("accepted", 1)


# ACKs that come before their transfer


def test_an_early_ack_refuses_the_transfer_when_it_comes(table: Table) -> None:
    assert table.ack("t") == ("parked", [])
    assert table.ack("t") == ("duplicate", [])
    with pytest.raises(InvalidTransition, match="given up by its consumer before it began"):
        table.open("t")
    table.table.validate()
    assert table.table.active == 0
    assert table.table.state("t") is SourceState.FAILED
    assert table.count("sources_refused") == 1


def test_an_early_ack_of_some_ranks_is_applied(table: Table) -> None:
    table.ack("t", rank=0, world_size=2)
    held(table)
    status, instructions = table.ack("t", rank=1, world_size=2)
    assert (status, len(instructions)) == ("accepted", 1)


def test_an_early_ack_of_another_incarnation_is_stale(table: Table) -> None:
    table.ack("t", consumer=RESTARTED)
    table.open("t")
    assert table.table.state("t") is SourceState.COMPUTING
    assert table.count("acks_stale") == 1


def test_early_acks_that_disagree_are_not_parked(table: Table) -> None:
    table.ack("t", rank=0, world_size=2)
    assert table.ack("t", rank=1, world_size=3) == ("invalid", [])
    assert table.ack("t", rank=1, world_size=2, consumer=RESTARTED) == ("stale", [])


def test_early_acks_are_bounded_in_number() -> None:
    table = Table(max_parked=2)
    for name in ("a", "b", "c"):
        assert table.ack(name) == ("parked", [])
    assert table.count("acks_dropped") == 1
    table.open("a")  # its ACK was the oldest
    with pytest.raises(InvalidTransition):
        table.open("b")


def test_early_acks_are_bounded_in_age_and_counted_once(table: Table) -> None:
    table.ack("t", rank=0, world_size=3)
    table.ack("t", rank=1, world_size=3)
    table.reap_after(LEASE_S)
    table.reap_after(LEASE_S)
    assert table.count("acks_unknown") == 2
    table.open("t")
    assert table.table.state("t") is SourceState.COMPUTING


def test_ended_transfers_are_remembered_within_bounds() -> None:
    table = Table(max_remembered=2)
    for name in ("a", "b", "c"):
        held(table, name)
        table.ack(name)
    assert table.table.state("a") is None
    assert table.ack("b") == ("duplicate", [])
    assert table.ack("a") == ("parked", [])


# Leases


def test_a_renewed_source_is_kept_however_long_it_takes(table: Table) -> None:
    held(table)
    for _ in range(100):
        assert not any(isinstance(instruction, Ended) for instruction in table.reap_after(LEASE_S - 1))
        assert table.renew("t") == "renewed"
    assert table.table.state("t") is SourceState.HELD


def test_a_computation_is_renewed_too(table: Table) -> None:
    table.open("t")
    table.now += LEASE_S - 1
    assert table.renew("t") == "renewed"
    assert table.reap_after(LEASE_S - 1) == []


def test_a_renewal_never_shortens(table: Table) -> None:
    held(table)
    table.now += 20
    table.renew("t")
    table.table.renew("t", CONSUMER, table.now - 15)  # a reordered one
    table.table.validate()
    assert table.reap_after(LEASE_S - 1) == []


def test_only_its_consumer_renews(table: Table) -> None:
    held(table)
    assert table.renew("t", RESTARTED) == "unknown"
    assert table.count("renewals_stale") == 1
    assert len(table.reap_after(LEASE_S)) == 1


def test_a_renewal_of_an_ended_source_says_so(table: Table) -> None:
    held(table)
    table.reap_after(LEASE_S)
    assert table.renew("t") == "ended"


def test_a_renewal_may_come_before_its_transfer(table: Table) -> None:
    assert table.renew("t") == "unknown"
    table.open("t")
    assert table.renew("t") == "renewed"


def test_the_reaper_looks_at_every_age(table: Table) -> None:
    held(table, "old but renewed")
    table.now += 20
    held(table, "young and forgotten")
    table.now += 5
    table.renew("old but renewed")
    ended = [end.transfer_id for end in table.reap_after(LEASE_S - 5) if isinstance(end, Ended)]
    assert ended == ["young and forgotten"]


def test_a_source_that_is_held_long_is_warned_about_ever_more_rarely(table: Table) -> None:
    held(table)
    ages = []
    for _ in range(50):
        table.renew("t")
        for instruction in table.reap_after(10):
            assert isinstance(instruction, LongHeld)
            assert (instruction.consumer, instruction.held) == (CONSUMER, 1)
            ages.append(instruction.age_s)
    assert ages == [60, 120, 240, 480]
    assert table.count("sources_long_held") == 4
