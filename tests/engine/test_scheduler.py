"""Who takes part in a step, and who has to wait."""

from __future__ import annotations

import random

from engine.blocks import BlockPool
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import Scheduled, Scheduler
from engine.sequence import Sequence, new_sequence


class Steps:
    """A scheduler, and a model that draws 7s."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, budget: int = 8, max_num_seqs: int = 8) -> None:
        self.blocks = BlockPool(num_blocks, block_size)
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
            )
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[str, int]]:
        """Who computed how many tokens."""
        step: list[Scheduled] = self.scheduler.schedule()
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


def test_blocks_are_not_reserved_past_who_waits_for_them() -> None:
    steps = Steps(num_blocks=4)
    steps.add("a", 12)
    steps.step()
    assert steps.scheduler.may_reserve
    waiting = steps.add("b", 8)
    steps.step()
    assert not steps.scheduler.may_reserve
    steps.scheduler.remove(waiting)
    assert steps.scheduler.may_reserve


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
                loaded = prompt - 1 if chance.random() < 0.4 and steps.scheduler.may_reserve else None
                if loaded is not None and steps.blocks.blocks_for(loaded) > steps.blocks.num_free:
                    loaded = None
                names.append(str(turn))
                steps.add(names[-1], prompt, output, loaded)
            if steps.scheduler.sequences():
                assert steps.step(), "nothing is computed, and nothing would ever change"
            assert steps.scheduler.num_running <= 20
        assert sorted(steps.finished) == sorted(names)
        assert steps.blocks.num_free == 12
