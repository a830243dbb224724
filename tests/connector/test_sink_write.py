"""Every edge of an import that the producer writes."""

from __future__ import annotations

import numpy as np
import pytest

from connector import InvalidTransition, Reason
from connector.imports import Fence, ImportState, Instruction, Landed, Settled, StopWriting
from connector.sink import Sink

PEER, MOVED = ("fabric", 0), ("fabric", 5)


class Table:
    """A sink with one WRITE expected, on a hand-set clock, validated after every event."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sink = Sink({"full": 16})
        self.sink.expect("t", PEER, {"full": np.array([3, 1], dtype=np.int64)}, now=self.now)
        self.sink.validate()

    def checked(self, instructions: list[Instruction]) -> list[Instruction]:
        self.sink.validate()
        return instructions

    def commit(self) -> list[Instruction]:
        return self.checked(self.sink.committed("t", self.now))

    def stopped(self) -> list[Instruction]:
        return self.checked(self.sink.not_written("t", "stopped", self.now))

    def cancel(self) -> list[Instruction]:
        return self.checked(self.sink.cancel("t", self.now))

    def tick_after(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        return self.checked(self.sink.tick(self.now))


@pytest.fixture
def table() -> Table:
    return Table()


def failed(reason: Reason, detail: str) -> list[Instruction]:
    return [Settled("t", "failed", reason, detail)]


CANCELLED: list[Instruction] = [Settled("t", "cancelled", Reason.CANCELLED, "cancelled by its owner")]


def test_the_commit_publishes(table: Table) -> None:
    assert table.sink.state("t") is ImportState.POSTED
    assert table.sink.quarantined == 0
    assert table.commit() == [Landed("t")]
    assert table.checked(table.sink.publish("t", table.now)) == [Settled("t", "published", None, "")]
    assert table.commit() == []
    assert table.sink.counters["commits_unknown"] == 1


def test_a_producer_that_fails_frees(table: Table) -> None:
    assert table.checked(table.sink.not_written("t", "out of memory", table.now)) == failed(
        Reason.PRODUCER_FAILED, "out of memory"
    )
    assert table.stopped() == []
    assert table.sink.counters["write_ends_unknown"] == 1


@pytest.mark.parametrize("answer", ["stopped", "commit"])
def test_a_cancelled_write_is_quarantined_until_the_producer_says_that_it_is_over(table: Table, answer: str) -> None:
    assert table.cancel() == [StopWriting("t")]
    assert table.cancel() == []
    assert table.sink.quarantined == 2
    with pytest.raises(InvalidTransition, match="still belongs to another import"):
        table.sink.expect("u", PEER, {"full": np.array([1], dtype=np.int64)}, now=table.now)
    assert (table.stopped() if answer == "stopped" else table.commit()) == CANCELLED
    assert table.sink.quarantined == 0


def test_without_a_limit_it_waits_as_long_as_its_request(table: Table) -> None:
    assert table.tick_after(1e6) == []


def test_a_write_that_is_late_is_asked_to_stop_once_and_never_fenced(table: Table) -> None:
    table.sink.limit("t", table.now + 30.0)
    assert table.tick_after(30.0) == [StopWriting("t")]
    assert table.tick_after(1e6) == []
    assert table.sink.quarantined == 2
    (settled,) = table.stopped()
    assert isinstance(settled, Settled)
    assert settled.reason is Reason.TIMEOUT


def test_pages_that_come_after_the_time_are_not_used(table: Table) -> None:
    table.sink.limit("t", table.now + 30.0)
    table.tick_after(30.0)
    (settled,) = table.commit()
    assert isinstance(settled, Settled)
    assert (settled.outcome, settled.reason) == ("failed", Reason.TIMEOUT)


def test_a_producer_that_does_not_know_it_any_more_writes_no_more(table: Table) -> None:
    assert table.checked(table.sink.source_lost("t", "ended", table.now)) == failed(Reason.SOURCE_EXPIRED, "ended")


def test_a_producer_that_is_gone_writes_no_more(table: Table) -> None:
    assert table.checked(table.sink.peer_down(PEER, "killed", table.now)) == [Fence(PEER, "killed")]
    assert table.sink.quarantined == 2
    assert table.checked(table.sink.fenced(PEER, "killed", table.now)) == failed(Reason.PEER_LOST, "killed")


def test_a_connection_that_is_torn_down_proves_nothing(table: Table) -> None:
    """The process behind it may still write."""
    assert table.checked(table.sink.peer_down(PEER, "late", table.now, gone=False)) == [
        StopWriting("t"),
        Fence(PEER, "late"),
    ]
    assert table.checked(table.sink.fenced(PEER, "late", table.now)) == []
    assert table.sink.quarantined == 2
    assert table.stopped() == failed(Reason.PEER_LOST, "late")


def test_the_death_of_a_producer_is_told_of_its_new_connection(table: Table) -> None:
    table.sink.peer_down(PEER, "late", table.now, gone=False)
    table.sink.fenced(PEER, "late", table.now)
    table.sink.moved(PEER, MOVED)
    table.sink.peer_down(PEER, "not it", table.now)
    assert table.sink.fenced(PEER, "not it", table.now) == []
    table.sink.peer_down(MOVED, "killed", table.now)
    assert table.checked(table.sink.fenced(MOVED, "killed", table.now)) == failed(Reason.PEER_LOST, "late")


def test_what_a_dead_producer_had_sent_may_still_arrive_for_a_while(table: Table) -> None:
    table.checked(table.sink.peer_down(PEER, "killed", table.now, quiet_s=5.0))
    assert table.checked(table.sink.fenced(PEER, "killed", table.now)) == []
    assert table.tick_after(4.9) == []
    assert table.sink.quarantined == 2
    assert table.tick_after(0.2) == failed(Reason.PEER_LOST, "killed")
