"""Every edge of a producer's life as its consumer sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connector import InvalidTransition
from connector.peer import (
    EDGES,
    FIRST_RETRY_S,
    LAST_RETRY_S,
    LOST_AFTER,
    SUSPECT_AFTER,
    DialAt,
    DropControl,
    Instruction,
    Peer,
    PeerState,
)


def peer() -> Peer:
    return Peer("prefill-0@b", now=100.0)


def ask(one: Peer, times: int) -> list[Instruction]:
    """So many heartbeats, and what the last one brought."""
    instructions: list[Instruction] = []
    for _ in range(times):
        instructions = one.asked(100.0)
    return instructions


def test_three_unanswered_heartbeats_make_it_suspect_and_a_word_clears_it() -> None:
    one = peer()
    assert ask(one, SUSPECT_AFTER) == []
    assert one.usable
    assert ask(one, 1) == []
    assert (one.state, one.usable) == (PeerState.SUSPECT, False)
    one.heard(103.5)
    assert one.usable
    ask(one, SUSPECT_AFTER)
    assert one.usable


def test_a_consumer_that_was_held_up_suspects_nobody() -> None:
    """It has asked nothing meanwhile, however much time has passed."""
    one = peer()
    assert one.asked(100.0) == one.asked(1000.0) == []
    assert one.usable


def test_ten_unanswered_heartbeats_end_the_connection_not_the_peer() -> None:
    one = peer()
    assert ask(one, LOST_AFTER) == []
    assert ask(one, 1) == [DropControl("prefill-0@b has not answered 10 heartbeats")]
    assert one.lost("dropped", 110.0) == [DialAt(110.0 + FIRST_RETRY_S)]
    assert one.state is PeerState.LOST


def test_it_is_tried_again_for_ever_ever_more_seldom() -> None:
    one = peer()
    (dial,) = one.lost("cut", 100.0)
    waits = []
    now = 100.0
    for _ in range(10):
        assert isinstance(dial, DialAt)
        waits.append(dial.when - now)
        now = dial.when
        one.dialling(now)
        (dial,) = one.refused("nobody there", now)
    assert waits[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert set(waits[7:]) == {LAST_RETRY_S}


def test_a_link_that_is_made_anew_starts_afresh() -> None:
    one = peer()
    one.lost("cut", 100.0)
    one.dialling(101.0)
    one.refused("nobody there", 101.0)
    one.dialling(103.0)
    one.linked(103.0)
    assert one.usable
    assert ask(one, SUSPECT_AFTER) == []
    assert one.usable
    assert one.lost("cut again", 106.0) == [DialAt(106.0 + FIRST_RETRY_S)]


def test_a_lost_data_connection_asks_for_a_new_handshake_once_there_is_one_to_drop() -> None:
    one = peer()
    assert one.data_lost("killed") == [DropControl("its data connection is down (killed)")]
    one.lost("dropped", 100.0)
    assert one.data_lost("killed") == []


@pytest.mark.parametrize("at", list(PeerState))
def test_what_is_gone_stays_gone(at: PeerState) -> None:
    one = peer()
    if at is PeerState.SUSPECT:
        ask(one, SUSPECT_AFTER + 1)
    if at in (PeerState.LOST, PeerState.DIALLING):
        one.lost("cut", 103.0)
    if at is PeerState.DIALLING:
        one.dialling(104.0)
    one.gone("another incarnation answers", 105.0)
    one.gone("closed", 106.0)
    assert one.state is PeerState.GONE
    assert (one.lost("cut", 107.0), one.refused("no", 107.0), one.data_lost("x"), ask(one, 20)) == ([], [], [], [])
    one.heard(201.0)
    assert not one.usable


@pytest.mark.parametrize(
    "event", [lambda one: one.dialling(1.0), lambda one: one.linked(1.0)], ids=["dialling", "linked"]
)
def test_what_cannot_happen_tells_the_story(event: Callable[[Peer], None]) -> None:
    with pytest.raises(InvalidTransition, match=r"linked at 100\.000"):
        event(peer())
    assert set(EDGES) == set(PeerState)
