"""Who takes part in a step, and who has to wait."""

from __future__ import annotations

import random

from engine.blocks import HashChain, root_hash
from engine.claims import PATIENCE
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import Scheduled, Scheduler
from engine.sequence import Sequence, new_sequence
from tests.block_pool import full_pool


class Steps:
    """A scheduler, and a model that draws 7s."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, budget: int = 8, max_num_seqs: int = 8) -> None:
        self.blocks = full_pool(num_blocks, block_size)
        self.scheduler = Scheduler(self.blocks, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
        self.finished: list[str] = []

    def add(self, name: str, prompt: int, max_tokens: int = 4, loaded: int | None = None) -> Sequence:
        """A request of `prompt` tokens, of which `loaded` have come with their blocks."""
        table = None if loaded is None else self.blocks.allocate(name, loaded)
        sequence = new_sequence(
            EngineRequest(
                request_id=name,
                prompt_token_ids=[1] * prompt,
                sampling=SamplingParams(),
                max_tokens=max_tokens,
                stop_token_ids=frozenset(),
                sink=lambda output: None,
                table=table,
                computed_tokens=loaded or 0,
            ),
            HashChain(root_hash("model"), self.blocks.block_size),
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[str, int]]:
        """Who computed how many tokens."""
        step: list[Scheduled] = self.scheduler.schedule().scheduled
        for one in step:
            sequence = one.sequence
            assert sequence.table is not None
            assert len(sequence.table.block_ids) * self.blocks.block_size >= sequence.computed + one.num_tokens
            sequence.computed += one.num_tokens
            if sequence.remaining == 0:
                sequence.tokens.append(7)
                if sequence.num_output == sequence.request.max_tokens:
                    self.scheduler.remove(sequence)
                    self.blocks.free(sequence.table)
                    self.finished.append(sequence.request.request_id)
        self.blocks.validate()
        return [(one.sequence.request.request_id, one.num_tokens) for one in step]


def test_the_budget_bounds_a_step_and_prompts_go_in_order() -> None:
    steps = Steps(budget=8)
    for name, prompt in (("a", 5), ("b", 9), ("c", 2)):
        steps.add(name, prompt)
    assert steps.step() == [("a", 5), ("b", 3)]
    assert steps.step() == [("a", 1), ("b", 6), ("c", 1)]
    assert steps.step() == [("a", 1), ("b", 1), ("c", 1)]


def test_those_that_need_one_token_go_first() -> None:
    steps = Steps(budget=4)
    steps.add("long", 40)
    steps.step()
    steps.add("moved", 6, loaded=5)
    assert steps.step() == [("moved", 1), ("long", 3)]


def test_no_more_sequences_than_allowed() -> None:
    steps = Steps(max_num_seqs=2)
    for name in "abc":
        steps.add(name, 2, max_tokens=2)
    assert steps.step() == [("a", 2), ("b", 2)]
    assert (steps.scheduler.num_running, steps.scheduler.num_waiting) == (2, 1)
    steps.step()
    assert steps.step() == [("c", 2)]


def test_a_waiting_head_is_not_overtaken() -> None:
    steps = Steps(num_blocks=4)
    steps.add("a", 8)
    steps.step()
    steps.add("big", 12)
    steps.add("small", 2)
    assert steps.step() == [("a", 1)]
    while "a" not in steps.finished:
        steps.step()
    assert steps.step() == [("big", 8)]
    assert steps.step() == [("big", 4), ("small", 2)]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    steps = Steps(num_blocks=4)
    steps.add("old", 4, max_tokens=9)
    young = steps.add("young", 4, max_tokens=9)
    steps.add("last", 4, max_tokens=2)
    assert steps.step() == [("old", 4), ("young", 4)]
    for _ in range(4):
        assert steps.step() == [("old", 1), ("young", 1)]
    # Both need a third block, and there is none.
    assert steps.step() == [("old", 1)]
    assert (young.table, young.computed, len(young.tokens)) == (None, 0, 9)
    while "old" not in steps.finished:
        steps.step()
    assert steps.step() == [("young", 8)]
    assert steps.step() == [("young", 1), ("last", 4)]


def test_one_that_was_scheduled_already_can_still_lose_its_blocks() -> None:
    steps = Steps(num_blocks=4, budget=16)
    old = steps.add("old", 12, loaded=5)
    young = steps.add("young", 5, loaded=4)
    assert old.table is not None
    steps.blocks.extend(old.table, 8)
    # The young one needs one token, goes first and takes the last block; the old one takes it away again.
    assert steps.step() == [("old", 7)]
    assert (young.table, steps.scheduler.preemptions) == (None, 1)


def test_when_all_have_lost_their_blocks_others_are_let_in() -> None:
    steps = Steps(num_blocks=4, max_num_seqs=1)
    steps.add("a", 8, max_tokens=5)
    steps.step()
    steps.add("moved", 8, loaded=7)
    # The one that runs needs a third block, and the other two belong to one that does not run yet.
    assert steps.step() == [("moved", 1)]


def test_the_oldest_gets_a_token_of_every_step() -> None:
    steps = Steps(budget=2)
    steps.add("long", 6, max_tokens=1)
    steps.step()
    for name in "abc":
        steps.add(name, 3, max_tokens=9, loaded=2)
    # One token is left of each budget, and the three others would take it for ever.
    assert [steps.step() for _ in range(3)] == [[("a", 1), ("long", 1)]] * 3
    assert steps.step() == [("long", 1), ("a", 1)]
    assert steps.finished == ["long"]


def test_blocks_are_not_reserved_past_who_waits_for_them() -> None:
    steps = Steps(num_blocks=4)
    steps.add("a", 12)
    steps.step()
    waiting = steps.add("b", 8)
    steps.step()
    assert steps.scheduler.reserve("pages", 4) is None
    assert not steps.scheduler.take_turn_of_claims()
    steps.scheduler.remove(waiting)
    assert steps.scheduler.take_turn_of_claims()
    assert not steps.scheduler.take_turn_of_claims()
    assert steps.scheduler.reserve("pages", 4) is not None


def test_a_reservation_behind_one_that_waits_has_its_turn_when_that_is_let_in() -> None:
    steps = Steps(num_blocks=4)
    steps.add("waiting", 4, max_tokens=1)
    assert steps.scheduler.reserve("pages", 4) is None  # the step that lets it in has not come
    steps.step()
    assert steps.scheduler.take_turn_of_claims()
    assert steps.scheduler.reserve("pages", 4) is not None


def test_sequences_that_come_later_do_not_starve_a_reservation() -> None:
    steps = Steps(num_blocks=4)
    steps.add("0", 8, max_tokens=4)
    steps.step()
    names = iter(range(1, 1000))
    for _ in range(100):
        steps.add(str(next(names)), 4, max_tokens=4)  # a block each, while the reservation needs all four
        steps.step()
        table = steps.scheduler.reserve("pages", 16)
        if table is not None:
            break
    else:
        raise AssertionError("never")
    assert len(table.block_ids) == 4
    assert steps.step() == []
    steps.blocks.free(table)
    assert steps.step() == [("2", 4), ("3", 4)]  # 1 was let in before the reservation was asked for


def test_a_claim_that_nobody_comes_back_for_is_forgotten() -> None:
    steps = Steps(num_blocks=1000)
    steps.add("long", 2, max_tokens=4000)
    steps.step()
    assert steps.scheduler.reserve("gone", 4000) is None
    steps.add("late", 1, max_tokens=1)
    for _ in range(3 * PATIENCE):
        assert steps.step() == [("long", 1)]  # nothing has come back, so there was no reason to ask again
    other = steps.blocks.allocate("other", 1)
    assert other is not None
    steps.blocks.free(other)
    assert [steps.step() for _ in range(PATIENCE - 1)] == [[("long", 1)]] * (PATIENCE - 1)
    assert steps.step() == [("long", 1), ("late", 1)]


def test_a_claim_holds_nobody_up_when_nothing_runs() -> None:
    steps = Steps(num_blocks=4)
    held = steps.blocks.allocate("held", 12)
    assert held is not None
    assert steps.scheduler.reserve("pages", 8) is None
    steps.add("small", 4)
    assert steps.step() == [("small", 4)]


def test_those_that_bring_their_blocks_are_admitted_before_those_that_wait() -> None:
    steps = Steps(max_num_seqs=1)
    steps.add("waiting", 4)
    steps.add("moved", 4, loaded=3, max_tokens=1)
    assert steps.step() == [("moved", 1)]
    assert steps.step() == [("waiting", 4)]


def test_everything_finishes_in_a_pool_that_is_far_too_small() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        steps = Steps(num_blocks=12, budget=chance.choice((1, 3, 16)), max_num_seqs=chance.choice((1, 3, 20)))
        names = []
        for turn in range(3000):
            if turn < 300 and chance.random() < 0.2:
                prompt, output = chance.randrange(1, 25), chance.randrange(1, 24)
                loaded = prompt - 1 if chance.random() < 0.4 else None
                if loaded is not None and steps.blocks.blocks_for(loaded) > steps.blocks.num_free:
                    loaded = None
                names.append(str(turn))
                steps.add(names[-1], prompt, output, loaded)
            if steps.scheduler.sequences():
                assert steps.step(), "nothing is computed, and nothing would ever change"
            assert steps.scheduler.num_running <= 20
        assert sorted(steps.finished) == sorted(names)
        assert steps.blocks.num_free == 12
