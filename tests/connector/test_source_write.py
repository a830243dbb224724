"""Every edge of a source that is written, and every event that must change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connector import EngineId, InvalidTransition
from connector.early import Early
from connector.source import Ended, Instruction, Notice, SourceState, Stop
from connector.source_table import SourceTable

CONSUMER = EngineId("decode-0", 1)
OTHER = EngineId("decode-1", 7)
PEER = ("fabric", 4)
LEASE_S = 30.0


class Table:
    """A table on a hand-set clock that is validated after every event."""

    def __init__(self) -> None:
        self.now = 100.0
        self.table = SourceTable(LEASE_S, warn_after_s=60.0)

    def open(self, transfer_id: str = "t", consumer: EngineId = CONSUMER) -> None:
        self.table.open(transfer_id, consumer, self.now, PEER)
        self.table.validate()

    def posted(self, *batches: int, transfer_id: str = "t") -> None:
        for batch in batches:
            self.table.posted(transfer_id, ("fabric", batch), self.now)
            self.table.validate()

    def computed(self) -> list[Instruction]:
        return self._validated(self.table.computed("t", self.now))

    def completed(self, batch: int, error: str | None = None) -> list[Instruction]:
        return self._validated(self.table.completed(("fabric", batch), error, self.now))

    def cancel(self, transfer_id: str = "t", consumer: EngineId = CONSUMER) -> list[Instruction]:
        return self._validated(self.table.cancel(transfer_id, consumer, self.now))

    def fail(self, detail: str = "no memory") -> list[Instruction]:
        return self._validated(self.table.fail("t", detail, self.now))

    def ack(self, transfer_id: str = "t") -> list[Instruction]:
        _, instructions = self.table.ack(transfer_id, CONSUMER, 0, 1, "published", self.now)
        return self._validated(instructions)

    def reap_after(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        return self._validated(self.table.reap(self.now))

    @property
    def state(self) -> SourceState | None:
        return self.table.state("t")

    def notices(self) -> list[tuple[str, str]]:
        return [(notice.kind, notice.detail) for notice in self.table.notices(CONSUMER)]

    def _validated(self, instructions: list[Instruction]) -> list[Instruction]:
        self.table.validate()
        return instructions


@pytest.fixture
def table() -> Table:
    made = Table()
    made.open()
    return made


def pushing(table: Table, *batches: int) -> None:
    table.posted(*(batches or (1, 2)))
    assert table.state is SourceState.PUSHING


def failed(kind: str, detail: str) -> list[Instruction]:
    return [Ended("t", "failed", detail, 0.0), Notice("t", CONSUMER, kind, detail)]  # type: ignore[arg-type]


# The way it should go


def test_the_commit_follows_the_last_completion(table: Table) -> None:
    pushing(table)
    assert table.completed(1) == []
    assert table.computed() == []
    assert table.completed(2) == [
        Notice("t", CONSUMER, "commit", ""),
        Ended("t", "flushed", "everything has arrived", 0.0),
    ]
    assert table.state is SourceState.FLUSHED
    assert table.notices() == [("commit", "")]
    assert table.ack() == []
    assert (table.state, table.notices(), table.table.active) == (SourceState.RELEASED, [], 0)


def test_completions_that_come_before_the_last_post_commit_nothing(table: Table) -> None:
    pushing(table, 1)
    assert table.completed(1) == []
    table.posted(2)
    assert table.completed(2) == []
    assert [type(instruction) for instruction in table.computed()] == [Notice, Ended]


def test_a_commit_that_is_never_acknowledged_is_kept_as_long_as_the_lease(table: Table) -> None:
    pushing(table, 1)
    table.computed()
    table.completed(1)
    table.now += LEASE_S - 1
    table.table.renew("t", CONSUMER, table.now)
    assert table.reap_after(LEASE_S - 1) == []
    assert table.notices() == [("commit", "")]
    assert table.reap_after(1) == []
    assert (table.state, table.notices()) == (SourceState.EXPIRED, [])


# Ways out


@pytest.mark.parametrize(
    ("end", "kind", "detail"),
    [
        (lambda table: table.cancel(), "stopped", "cancelled by the consumer"),
        (lambda table: table.fail(), "failed", "no memory"),
        (lambda table: table.completed(1, "cable pulled"), "failed", "cable pulled"),
        (lambda table: table.ack(), "stopped", "given up by the consumer while it was computed: published"),
    ],
    ids=["cancel", "fail", "error", "ack"],
)
def test_what_is_in_flight_keeps_the_blocks(table: Table, end: object, kind: str, detail: str) -> None:
    pushing(table, 1, 2)
    assert end(table) == [Stop("t", detail)]  # type: ignore[operator]
    assert table.state == "stopping"
    last = table.completed(2) or table.completed(1)
    assert last[0] == Ended("t", "failed", detail, 0.0)
    assert last[1:] in ([Notice("t", CONSUMER, kind, detail)], [])  # type: ignore[arg-type]
    assert table.state is SourceState.FAILED


@pytest.mark.parametrize("state", ["computing", "pushing and quiet"])
def test_with_nothing_in_flight_it_ends_at_once(table: Table, state: str) -> None:
    if state != "computing":
        pushing(table, 1)
        table.completed(1)
    instructions = table.cancel()
    assert [one for one in instructions if not isinstance(one, Stop)] == failed("stopped", "cancelled by the consumer")


def test_a_lease_that_ends_stops_the_push_and_tells(table: Table) -> None:
    pushing(table, 1)
    (stop,) = table.reap_after(LEASE_S)
    assert isinstance(stop, Stop)
    with pytest.raises(InvalidTransition, match="must not be posted"):
        table.posted(2)
    assert not table.table.may_post("t")
    assert table.reap_after(10 * LEASE_S) == []  # nothing is freed while something is in flight
    assert [type(one) for one in table.completed(1)] == [Ended, Notice]


def test_the_first_reason_stands(table: Table) -> None:
    pushing(table, 1, 2)
    table.completed(1, "cable pulled")
    assert table.cancel() == []
    assert table.fail("too late") == []
    assert table.completed(2) == failed("failed", "cable pulled")


def test_a_consumer_that_is_lost_ends_at_the_fence(table: Table) -> None:
    pushing(table, 1, 2)
    assert table._validated(table.table.peer_down(PEER, "killed", table.now)) == [
        Stop("t", "the consumer is lost: killed")
    ]
    assert table._validated(table.table.peer_down(("fabric", 9), "another", table.now)) == []
    ended = table._validated(table.table.fenced(PEER, "killed", table.now))
    assert ended == failed("failed", "the consumer is lost: killed")
    assert table.completed(1) == []
    assert table.table.counters["pushes_unknown"] == 1


def test_closing_ends_at_the_fence_too(table: Table) -> None:
    pushing(table, 1)
    assert table._validated(table.table.close(table.now)) == [Stop("t", "the connector was closed")]
    assert table.table.peers() == {PEER}
    assert table._validated(table.table.fenced(PEER, "closed", table.now)) == failed(
        "failed", "the connector was closed"
    )


# Repeated and early


def test_a_cancel_is_answered_each_time_and_the_commit_again_when_that_came_first(table: Table) -> None:
    pushing(table, 1)
    table.computed()
    table.completed(1)
    assert table.cancel() == table.cancel() == [Notice("t", CONSUMER, "commit", "")]
    table.ack()
    assert table.cancel() == [Notice("t", CONSUMER, "stopped", "it is not written to")]


def test_a_cancel_that_comes_first_makes_the_request_be_refused() -> None:
    table = Table()
    assert table.cancel() == [Notice("t", CONSUMER, "stopped", "it is not written to")]
    table.open("t", OTHER)  # somebody else's transfer of that name is not meant
    table.table.fail("t", "done with", table.now)
    table.cancel("u")
    with pytest.raises(InvalidTransition, match="given up by its consumer before it began"):
        table.open("u")
    table.table.validate()


def test_a_cancel_of_somebody_elses_transfer_stops_nothing(table: Table) -> None:
    pushing(table, 1)
    assert table.cancel(consumer=OTHER) == [Notice("t", OTHER, "stopped", "it is not written to")]
    assert table.state is SourceState.PUSHING


def twice(table: Table) -> None:
    pushing(table, 1)
    table.computed()
    table.computed()


@pytest.mark.parametrize(
    "event",
    [
        lambda table: table.table.hold("t", 3, table.now),
        lambda table: table.posted(1, 1),
        lambda table: table.computed(),
        twice,
    ],
    ids=["hold", "posted twice", "computed without a post", "computed twice"],
)
def test_what_cannot_happen_tells_the_story(table: Table, event: Callable[[Table], object]) -> None:
    with pytest.raises(InvalidTransition, match="opened by decode-0"):
        event(table)
    table.table.validate()


def test_an_unknown_transfer_is_not_posted_for(table: Table) -> None:
    with pytest.raises(InvalidTransition, match="was never opened"):
        table.posted(1, transfer_id="x")


# What came early is remembered, within bounds


def test_a_cancel_is_never_forgotten_before_its_time() -> None:
    early = Early(SourceTable(LEASE_S, 60.0).counters, acks_s=LEASE_S, cancels_s=900.0, max_cancels=2)
    assert early.cancel("a", CONSUMER, 0.0)
    assert early.cancel("b", CONSUMER, 1.0)
    assert not early.cancel("c", CONSUMER, 2.0)  # unanswered: its consumer asks again, and keeps its blocks
    assert early.cancel("a", CONSUMER, 3.0)
    early.expire(900.0)
    assert early.cancelled("a", CONSUMER)
    assert early.cancel("c", CONSUMER, 901.0)  # "b" has had its time
    assert not early.cancelled("b", CONSUMER)
    early.validate()


def test_a_renewal_of_ten_thousand_sources_and_their_reaping_ask_for_nothing() -> None:
    table = Table()
    for number in range(10_000):
        table.table.open(str(number), CONSUMER, table.now)
        table.table.hold(str(number), 1, table.now)
    table.now += LEASE_S / 2
    for number in range(10_000):
        assert table.table.renew(str(number), CONSUMER, table.now) == "renewed"
    assert table.reap_after(LEASE_S - 1) == []
    assert (table.table.held, table.table.active) == (10_000, 10_000)
