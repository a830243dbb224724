"""Every edge of the import's state machine, and who owns the destination at each."""

from __future__ import annotations

import numpy as np
import pytest

from connector import InvalidTransition, Reason
from connector.imports import Fence, ImportState, Instruction, Landed, PeerKey, Settled, StopWriting
from connector.lease import Lease
from connector.sink import Sink

PEER: PeerKey = ("fabric", 0)
OTHER: PeerKey = ("fabric", 1)
TIMEOUT_S = 30.0
LEASE_S = 30.0


class Table:
    """A sink on a hand-set clock that is validated after every event."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sink = Sink({"full": 16, "window": 8}, max_remembered=4)

    def plan(self, transfer_id: str, blocks: list[int], peer: PeerKey = PEER, lease: Lease | None = None) -> None:
        self.sink.plan(
            transfer_id,
            peer,
            {"full": np.array(blocks, dtype=np.int64)},
            lease=lease,
            deadline=self.now + TIMEOUT_S,
            now=self.now,
        )
        self.sink.validate()

    def post(self, transfer_id: str, *batches: int, done: bool = True) -> list[Instruction]:
        for batch in batches:
            self.sink.posted(transfer_id, ("fabric", batch), self.now)
            self.sink.validate()
        instructions = self.sink.posting_done(transfer_id, self.now) if done else []
        self.sink.validate()
        return instructions

    def completed(self, batch: int, error: str | None = None) -> list[Instruction]:
        instructions = self.sink.completed(("fabric", batch), error, self.now)
        self.sink.validate()
        return instructions

    def owns(self, block: int) -> bool:
        try:
            self.plan("probe", [block])
        except InvalidTransition:
            return True
        self.sink.post_failed("probe", Reason.PLAN_REFUSED, "only a probe", self.now)
        self.sink.validate()
        return False


@pytest.fixture
def table() -> Table:
    return Table()


def posted(table: Table, transfer_id: str = "t", batches: tuple[int, ...] = (1, 2), peer: PeerKey = PEER) -> None:
    table.plan(transfer_id, [batches[0]], peer)
    table.post(transfer_id, *batches)


def failed(reason: Reason, detail: str) -> list[Instruction]:
    return [Settled("t", "failed", reason, detail)]


# The edges


def test_planning_takes_the_destination_over(table: Table) -> None:
    table.plan("t", [3, 1])
    assert table.sink.state("t") is ImportState.PLANNED
    assert table.owns(3)
    assert not table.owns(2)


def test_it_lands_with_its_last_batch_and_publishes(table: Table) -> None:
    table.plan("t", [1])
    assert table.post("t", 1, 2) == []
    assert table.sink.state("t") is ImportState.POSTED
    assert table.completed(2) == []
    assert table.completed(1) == [Landed("t")]
    assert table.sink.state("t") is ImportState.LANDED
    assert table.owns(1)
    assert table.sink.publish("t", table.now) == [Settled("t", "published", None, "")]
    table.sink.validate()
    assert not table.owns(1)
    assert table.sink.active == 0


def test_batches_that_complete_while_others_are_posted_do_not_land_it(table: Table) -> None:
    table.plan("t", [1])
    table.post("t", 1, done=False)
    assert table.completed(1) == []
    table.post("t", 2, done=False)
    assert table.sink.posting_done("t", table.now) == []
    assert table.completed(2) == [Landed("t")]


def test_everything_complete_before_the_posting_ends_lands_it_then(table: Table) -> None:
    table.plan("t", [1])
    table.post("t", 1, done=False)
    table.completed(1)
    assert table.sink.posting_done("t", table.now) == [Landed("t")]


def test_the_first_error_does_not_free_the_siblings_blocks(table: Table) -> None:
    posted(table)
    assert table.completed(1, "remote access error") == []
    assert table.sink.state("t") is ImportState.FAILING
    assert table.owns(1)
    assert table.completed(2) == failed(Reason.TRANSFER_ERROR, "remote access error")
    assert not table.owns(1)


def test_the_first_reason_stands(table: Table) -> None:
    posted(table)
    table.completed(1, "first")
    assert table.completed(2, "second") == failed(Reason.TRANSFER_ERROR, "first")
    assert table.sink.counters["batches_failed"] == 2


def test_a_cancelled_import_keeps_its_blocks_until_every_batch_is_terminal(table: Table) -> None:
    posted(table)
    assert table.sink.cancel("t", table.now) == []
    assert table.sink.state("t") is ImportState.CANCELLING
    table.completed(1)
    assert table.owns(1)
    (settled,) = table.completed(2)
    assert isinstance(settled, Settled)
    assert (settled.outcome, settled.reason) == ("cancelled", Reason.CANCELLED)
    assert not table.owns(1)


def test_an_error_during_cancelling_stays_a_cancel(table: Table) -> None:
    posted(table)
    table.sink.cancel("t", table.now)
    table.completed(1, "error")
    (settled,) = table.completed(2)
    assert isinstance(settled, Settled)
    assert settled.outcome == "cancelled"


def test_cancelling_what_is_failing_or_over_changes_nothing(table: Table) -> None:
    posted(table)
    table.completed(1, "error")
    assert table.sink.cancel("t", table.now) == []
    assert table.sink.state("t") is ImportState.FAILING
    table.completed(2)
    assert table.sink.cancel("t", table.now) == []


def test_nothing_could_be_posted(table: Table) -> None:
    table.plan("t", [1])
    assert table.sink.post_failed("t", Reason.PEER_LOST, "fenced", table.now) == failed(Reason.PEER_LOST, "fenced")
    table.sink.validate()
    assert not table.owns(1)


def test_what_was_posted_before_a_post_failed_is_waited_for(table: Table) -> None:
    table.plan("t", [1])
    table.post("t", 1, done=False)
    assert table.sink.post_failed("t", Reason.PEER_LOST, "down", table.now) == []
    table.sink.validate()
    assert table.sink.state("t") is ImportState.FAILING
    assert table.completed(1) == failed(Reason.PEER_LOST, "down")


# The lease


def test_a_read_that_finishes_within_the_lease_lands(table: Table) -> None:
    table.plan("t", [1], lease=Lease(table.now, LEASE_S))
    table.post("t", 1)
    table.now += LEASE_S - 0.001
    assert table.completed(1) == [Landed("t")]


def test_a_read_that_finishes_at_the_end_of_the_lease_is_discarded(table: Table) -> None:
    table.plan("t", [1], lease=Lease(table.now, LEASE_S))
    table.post("t", 1)
    table.now += LEASE_S
    (settled,) = table.completed(1)
    assert isinstance(settled, Settled)
    assert (settled.outcome, settled.reason) == ("failed", Reason.SOURCE_EXPIRED)
    assert table.sink.counters["reads_after_expiry"] == 1
    assert not table.owns(1)


def test_a_renewed_lease_lets_it_land(table: Table) -> None:
    lease = Lease(table.now, LEASE_S)
    table.plan("t", [1], lease=lease)
    table.post("t", 1)
    table.now += LEASE_S - 5
    lease.renew(table.now)
    table.now += 4
    assert table.completed(1) == [Landed("t")]


def test_a_lapsed_lease_fails_it_and_waits_for_its_batches(table: Table) -> None:
    table.plan("t", [1], lease=Lease(table.now - 10, LEASE_S))
    table.post("t", 1)
    table.now += LEASE_S - 10
    assert table.sink.tick(table.now) == []
    table.sink.validate()
    assert table.sink.state("t") is ImportState.FAILING
    assert table.owns(1)
    (settled,) = table.completed(1)
    assert isinstance(settled, Settled)
    assert settled.reason is Reason.SOURCE_EXPIRED


def test_a_source_that_has_ended_fails_it(table: Table) -> None:
    posted(table)
    assert table.sink.source_lost("t", "the producer expired it", table.now) == []
    table.completed(1)
    assert table.completed(2) == failed(Reason.SOURCE_EXPIRED, "the producer expired it")
    assert table.sink.source_lost("t", "again", table.now) == []


# Deadlines, deaths and fences


def test_a_timeout_fences_the_peer_and_never_frees_by_itself(table: Table) -> None:
    posted(table)
    table.now += TIMEOUT_S - 0.001
    assert table.sink.tick(table.now) == []
    table.now += 0.001
    (fence,) = table.sink.tick(table.now)
    table.sink.validate()
    assert isinstance(fence, Fence)
    assert fence.peer == PEER
    assert table.sink.state("t") is ImportState.FAILING
    assert table.owns(1)
    (settled,) = table.sink.fenced(PEER, fence.cause, table.now)
    table.sink.validate()
    assert isinstance(settled, Settled)
    assert (settled.outcome, settled.reason) == ("failed", Reason.TIMEOUT)
    assert not table.owns(1)


def test_a_cancelled_import_whose_completion_is_lost_is_fenced_at_its_deadline(table: Table) -> None:
    posted(table)
    table.sink.cancel("t", table.now)
    table.now += TIMEOUT_S
    (fence,) = table.sink.tick(table.now)
    assert isinstance(fence, Fence)
    (settled,) = table.sink.fenced(PEER, fence.cause, table.now)
    assert isinstance(settled, Settled)
    assert settled.outcome == "cancelled"


def test_one_fence_for_all_that_time_out_on_one_peer_and_their_siblings_fail_with_it(table: Table) -> None:
    posted(table, "a", (1,))
    posted(table, "b", (2,))
    table.now += TIMEOUT_S - 1
    posted(table, "late", (3,))
    posted(table, "elsewhere", (4,), peer=OTHER)
    table.now += 1
    fences = table.sink.tick(table.now)
    assert [fence.peer for fence in fences if isinstance(fence, Fence)] == [PEER]
    settled = table.sink.fenced(PEER, "timeout", table.now)
    table.sink.validate()
    reasons = {end.transfer_id: end.reason for end in settled if isinstance(end, Settled)}
    assert reasons == {"a": Reason.TIMEOUT, "b": Reason.TIMEOUT, "late": Reason.PEER_LOST}
    assert table.sink.state("elsewhere") is ImportState.POSTED


def test_a_dead_peer_is_fenced_before_anything_is_freed(table: Table) -> None:
    posted(table)
    assert table.sink.peer_down(PEER, "killed", table.now) == [Fence(PEER, "killed")]
    table.sink.validate()
    assert table.sink.state("t") is ImportState.FAILING
    assert table.owns(1)
    table.completed(1, "endpoint closed")
    assert table.owns(1)
    assert table.completed(2, "endpoint closed") == failed(Reason.PEER_LOST, "killed")
    assert table.sink.fenced(PEER, "killed", table.now) == []


def test_a_peer_that_the_transport_finds_late_may_still_write(table: Table) -> None:
    posted(table, "late", (1,))
    table.now += TIMEOUT_S / 2
    posted(table, "sibling", (2,))
    table.sink.expect("written", PEER, {"full": np.array([3], dtype=np.int64)}, now=table.now)
    table.now += TIMEOUT_S / 2
    stop, fence = table.sink.peer_down(PEER, "batch 1 was not over in time", table.now, gone=False)
    table.sink.validate()
    assert (stop, fence) == (StopWriting("written"), Fence(PEER, "batch 1 was not over in time"))
    settled = table.sink.fenced(PEER, "late", table.now)
    table.sink.validate()
    reasons = {end.transfer_id: end.reason for end in settled if isinstance(end, Settled)}
    assert reasons == {"late": Reason.TIMEOUT, "sibling": Reason.PEER_LOST}
    assert table.owns(3)


def test_a_fence_spares_what_has_landed(table: Table) -> None:
    posted(table)
    table.completed(1)
    table.completed(2)
    assert table.sink.fenced(PEER, "too late to matter", table.now) == []
    table.sink.validate()
    assert table.sink.state("t") is ImportState.LANDED
    table.sink.publish("t", table.now)


def test_a_fence_during_the_posting_is_told_by_the_next_post(table: Table) -> None:
    table.plan("t", [1])
    table.post("t", 1, done=False)
    assert table.sink.fenced(PEER, "gone", table.now) == []
    table.sink.validate()
    assert table.owns(1)
    assert table.sink.post_failed("t", Reason.PEER_LOST, "fenced", table.now) == failed(
        Reason.PEER_LOST, "fenced: gone"
    )


# Completions that must change nothing


def test_repeated_and_late_completions_are_counted_and_ignored(table: Table) -> None:
    posted(table)
    table.completed(1)
    assert table.completed(1) == []
    assert table.sink.state("t") is ImportState.POSTED
    table.sink.fenced(PEER, "gone", table.now)
    assert table.completed(2) == []
    assert table.sink.counters["completions_late"] == 2


def test_unknown_completions_are_counted_and_ignored(table: Table) -> None:
    posted(table)
    assert table.completed(99) == []
    assert table.sink.state("t") is ImportState.POSTED
    assert table.sink.counters["completions_unknown"] == 1


def test_the_memory_of_late_completions_is_bounded(table: Table) -> None:
    for number in range(1, 7):
        posted(table, f"t{number}", (number,))
        table.completed(number)
        table.sink.publish(f"t{number}", table.now)
    table.completed(1)
    table.completed(6)
    assert table.sink.counters["completions_unknown"] == 1
    assert table.sink.counters["completions_late"] == 1


# What cannot happen


def test_a_block_has_one_owner(table: Table) -> None:
    table.plan("t", [1, 2])
    with pytest.raises(InvalidTransition, match="block 2 of group 'full' still belongs to another import"):
        table.plan("u", [2, 3])
    table.sink.validate()
    assert not table.owns(3)


def test_equal_ids_of_different_groups_are_different_blocks(table: Table) -> None:
    table.plan("t", [1])
    table.sink.plan("u", PEER, {"window": np.array([1])}, lease=None, deadline=table.now + TIMEOUT_S, now=table.now)
    table.sink.validate()


def test_a_transfer_is_imported_once_at_a_time(table: Table) -> None:
    posted(table)
    with pytest.raises(InvalidTransition, match="is being imported already: planned for peer"):
        table.plan("t", [7])


def test_a_batch_after_the_last_is_refused(table: Table) -> None:
    posted(table)
    with pytest.raises(InvalidTransition, match="was not expected"):
        table.post("t", 3)


def test_publishing_what_has_not_landed_is_refused(table: Table) -> None:
    posted(table)
    with pytest.raises(InvalidTransition, match=r"is posted, not to become published: planned for peer .*; posted at"):
        table.sink.publish("t", table.now)
    with pytest.raises(InvalidTransition, match="is not being imported"):
        table.sink.publish("u", table.now)


def test_posting_nothing_is_refused(table: Table) -> None:
    table.plan("t", [1])
    with pytest.raises(InvalidTransition, match="nothing to finish posting"):
        table.sink.posting_done("t", table.now)
