"""What a pool keeps of what was computed, and who gets it: hits, copies, eviction, groups that have to agree."""

from __future__ import annotations

import random

import pytest

from engine.blocks import NO_BLOCK, Admission, BlockGroup, BlockPool, BlockTable, HashChain, StateSlots, root_hash
from engine.blocks.kinds import Chunked, Kind, WholeContext, Window
from engine.page_work import BlockCopy
from tests.block_pool import full_pool

SIZE = 4


def chain(salt: str = "") -> HashChain:
    return HashChain(root_hash("model", "", salt), SIZE)


def tokens(count: int, salt: int = 0) -> list[int]:
    return [(salt * 1009 + place * 7) % 499 for place in range(count)]


def admit(pool: BlockPool, prompt: list[int], salt: str = "", step: int = 1000) -> Admission:
    admission = pool.admit("asker", prompt, chain(salt), step)
    assert admission is not None
    return admission


def compute(pool: BlockPool, prompt: list[int], salt: str = "", *, keep: bool = False) -> BlockTable:
    """Admit a prompt, and write all of it."""
    table = admit(pool, prompt, salt).table
    pool.publish_tail(table, prompt, len(prompt), chain(salt))
    if not keep:
        pool.free(table)
    return table


def groups(**kinds: Kind) -> BlockPool:
    return BlockPool([BlockGroup(name, kind, 32) for name, kind in kinds.items()], SIZE)


def test_a_prompt_with_the_same_beginning_shares_its_blocks() -> None:
    pool = full_pool(16, SIZE, prefix_cache=True)
    first = compute(pool, tokens(10), keep=True)
    second = admit(pool, [*tokens(8), 400, 401, 402])
    assert second.cached_tokens == 8
    assert second.copies == []
    assert second.table.block_ids[:2] == first.block_ids[:2]
    assert second.table.block_ids[2] != first.block_ids[2]
    pool.validate()
    pool.free(first)
    pool.validate()
    assert pool.num_free == 16 - 3
    pool.free(second.table)
    assert pool.num_free == 16


def test_nothing_is_shared_before_it_is_published() -> None:
    pool = full_pool(16, SIZE, prefix_cache=True)
    first = admit(pool, tokens(9))
    assert admit(pool, tokens(9)).cached_tokens == 0  # in the same step
    pool.publish(first.table, tokens(9), 5, chain())
    assert admit(pool, tokens(9)).cached_tokens == 4


def test_one_token_is_always_left_to_compute() -> None:
    pool = full_pool(16, SIZE, prefix_cache=True)
    compute(pool, tokens(8))
    again = admit(pool, tokens(8))
    assert again.cached_tokens == 7
    assert again.copies[0].destination == again.table.block_ids[1]
    assert admit(pool, tokens(1)).cached_tokens == 0


def test_salts_see_nothing_of_each_other() -> None:
    pool = full_pool(16, SIZE, prefix_cache=True)
    compute(pool, tokens(8), "mine")
    assert admit(pool, tokens(8), "yours").cached_tokens == 0
    assert admit(pool, tokens(9), "mine").cached_tokens == 8


def test_without_a_cache_nothing_is_kept() -> None:
    pool = full_pool(16, SIZE)
    compute(pool, tokens(9))
    assert (admit(pool, tokens(9)).cached_tokens, pool.num_cached) == (0, 0)


@pytest.mark.parametrize("length", [6, 7, 8])
def test_the_beginning_of_a_block_is_copied(length: int) -> None:
    pool = full_pool(16, SIZE, prefix_cache=True)
    first = compute(pool, tokens(length))
    source = first.block_ids[1]
    wanted = [*tokens(6), 498, 497, 496]
    admission = admit(pool, wanted)
    assert admission.cached_tokens == 6
    assert admission.table.block_ids[0] == first.block_ids[0]
    assert admission.copies == [BlockCopy(group="full", source=source, destination=admission.table.block_ids[1])]
    assert admission.table.block_ids[1] != source
    pool.validate()
    # The source may not be taken until the copy has been made.
    taken = pool.allocate("other", 13 * SIZE)
    assert taken is None
    pool.copied(admission.copies)
    pool.validate()
    assert pool.allocate("other", 13 * SIZE) is not None


def test_the_longest_unused_goes_first_and_a_prefix_outlives_its_end() -> None:
    pool = full_pool(6, SIZE, prefix_cache=True)
    compute(pool, tokens(12, 1))
    compute(pool, tokens(12, 2))
    pool.free(admit(pool, [*tokens(8, 1), 490]).table)  # uses the first again, and takes the block of its end
    taken = pool.allocate("other", 3 * SIZE)
    assert taken is not None
    pool.free(taken)
    again = admit(pool, tokens(13, 1))
    assert again.cached_tokens == 8
    pool.free(again.table)
    assert admit(pool, tokens(13, 2)).cached_tokens == 4


def test_a_hit_that_cannot_be_completed_takes_nothing() -> None:
    pool = full_pool(4, SIZE, prefix_cache=True)
    compute(pool, tokens(8))
    held = pool.allocate("held", 2 * SIZE)
    assert held is not None
    assert pool.admit("big", [*tokens(6), *range(20)], chain(), 1000) is None
    pool.validate()
    assert pool.num_free == 2
    assert admit(pool, [*tokens(4), 3]).cached_tokens == 4


def test_a_windowed_group_needs_only_what_is_seen() -> None:
    pool = groups(window=Window(5))
    table = compute(pool, tokens(16), keep=True)
    pool.trim(table, 16)
    assert table.groups["window"][:3] == [NO_BLOCK] * 3
    pool.validate()
    admission = admit(pool, tokens(17))
    assert admission.cached_tokens == 16
    assert admission.table.groups["window"][:3] == [NO_BLOCK] * 3
    assert admission.table.groups["window"][3] == table.groups["window"][3]
    assert len(admission.table.by_group()["window"]) == 2


def test_a_windowed_group_is_given_blocks_step_by_step() -> None:
    pool = groups(full=WholeContext(), window=Window(5))
    admission = admit(pool, tokens(30), step=8)
    assert {name: len(ids) for name, ids in admission.table.groups.items()} == {"full": 8, "window": 2}
    for computed in (8, 16, 24):
        pool.trim(admission.table, computed)
        assert pool.extend(admission.table, min(30, computed + 8), computed)
        assert len(admission.table.by_group()["window"]) <= Window(5).most_blocks(30, 8, SIZE)
    pool.validate()
    pool.free(admission.table)
    assert pool.num_free == 64


def test_groups_agree_on_a_hit() -> None:
    pool = groups(full=WholeContext(), window=Window(5))
    table = compute(pool, tokens(24), keep=True)
    pool.trim(table, 24)
    pool.free(table)
    assert admit(pool, [*tokens(24), 1]).cached_tokens == 24
    # Others have taken the window's last block: what the full group has is of no use alone.
    window = pool.groups["window"]
    window.index.remove(table.groups["window"][5])
    assert admit(pool, [*tokens(24), 2]).cached_tokens == 20


def test_a_chunked_group_is_resumed_at_the_border_of_a_chunk_with_nothing() -> None:
    pool = groups(full=WholeContext(), chunked=Chunked(8))
    table = compute(pool, tokens(16), keep=True)
    pool.trim(table, 16)
    assert pool.num_cached > 0
    pool.free(table)
    for block in table.groups["chunked"]:
        pool.groups["chunked"].index.remove(block)
    assert admit(pool, tokens(18)).cached_tokens == 16


def test_a_state_is_resumed_where_one_was_kept() -> None:
    pool = groups(full=WholeContext(), state=StateSlots(aligned=True))
    prompt = tokens(14)
    admission = admit(pool, prompt)
    assert admission.cached_tokens == 0
    hashes = chain().of(prompt, 3)
    pool.publish(admission.table, prompt, 8, chain())
    copies = pool.keep_states(admission.table, hashes[1])
    assert [copy.source for copy in copies] == [admission.table.groups["state"][0]]
    assert admit(pool, prompt).cached_tokens == 0  # not yet copied
    pool.kept(copies, hashes[1])
    pool.publish(admission.table, prompt, 14, chain())
    pool.validate()

    again = admit(pool, prompt)
    assert again.cached_tokens == 8  # though the full group has 12
    assert again.copies == [
        BlockCopy(group="state", source=copies[0].destination, destination=again.table.groups["state"][0])
    ]
    pool.copied(again.copies)
    assert pool.keep_states(again.table, hashes[1]) == []
    pool.validate()


def test_a_state_that_is_not_kept_is_not_resumed() -> None:
    pool = groups(full=WholeContext(), state=StateSlots(aligned=False))
    compute(pool, tokens(14))
    assert admit(pool, tokens(14)).cached_tokens == 0


def test_scratch_slots_come_back_and_never_leave() -> None:
    pool = groups(state=StateSlots(aligned=True))
    table = admit(pool, tokens(4)).table
    assert pool.take_scratch(table)
    assert pool.take_scratch(table)
    assert table.scratch["state"] != table.groups["state"][0]
    assert table.by_group() == {"state": [table.groups["state"][0]]}
    pool.validate()
    pool.free(table)
    assert pool.num_free == 32


def test_blocks_for_pages_to_come_are_those_that_the_next_token_sees() -> None:
    pool = groups(full=WholeContext(), window=Window(5), state=StateSlots(aligned=True))
    table = pool.allocate("moved", 22)
    assert table is not None
    assert {name: len(ids) for name, ids in table.by_group().items()} == {"full": 6, "window": 2, "state": 1}
    assert len(table.groups["window"]) == 6


def test_a_lent_table_drops_nothing() -> None:
    pool = groups(window=Window(5))
    table = admit(pool, tokens(20)).table
    pool.lend(table)
    pool.trim(table, 20)
    assert NO_BLOCK not in table.groups["window"]
    pool.returned(table)
    pool.trim(table, 20)
    assert table.groups["window"][:4] == [NO_BLOCK] * 4


def test_newly_taken_blocks_of_attention_are_recorded_once() -> None:
    pool = BlockPool(
        [
            BlockGroup("full", WholeContext(), 8, zeroing=True),
            BlockGroup("state", StateSlots(aligned=True), 8, zeroing=True),
        ],
        SIZE,
    )
    moved = pool.allocate("moved", 8)
    assert pool.take_unzeroed() == {}
    table = admit(pool, tokens(9)).table
    assert pool.take_unzeroed() == {"full": table.groups["full"]}
    assert pool.take_unzeroed() == {}
    assert pool.extend(table, 13, 9)
    assert pool.take_unzeroed() == {"full": table.groups["full"][3:]}
    pool.record_unzeroed({"full": table.groups["full"][:1]})
    assert pool.take_unzeroed() == {"full": table.groups["full"][:1]}
    assert moved is not None
    pool.free(moved)
    pool.record_unzeroed({"full": moved.groups["full"]})  # nobody holds them: they are recorded when they are taken
    assert pool.take_unzeroed() == {}


def test_hits_are_not_zeroed() -> None:
    pool = full_pool(8, SIZE, prefix_cache=True, zeroing=True)
    compute(pool, tokens(8))
    pool.take_unzeroed()
    admission = admit(pool, [*tokens(8), 1])
    assert pool.take_unzeroed() == {"full": admission.table.block_ids[2:]}


def test_a_freed_block_that_was_never_zeroed_is_recorded_when_it_is_taken_again() -> None:
    pool = full_pool(2, SIZE, zeroing=True)
    pool.free(admit(pool, tokens(8)).table)
    assert pool.take_unzeroed() == {}
    table = admit(pool, tokens(8)).table
    assert pool.take_unzeroed() == {"full": table.block_ids}


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_operations_hits_only_what_was_written(seed: int) -> None:
    """A model that stores tokens: whatever is read back at a cached position is what the prompt has there."""
    chance = random.Random(seed)
    kinds: dict[str, Kind] = {"full": WholeContext(), "window": Window(chance.choice((3, 6, 9)))}
    if seed % 2:
        kinds["state"] = StateSlots(aligned=True)
    pool = BlockPool([BlockGroup(name, kind, 14) for name, kind in kinds.items()], SIZE)
    memory: dict[tuple[str, int, int], int] = {}
    states: dict[int, tuple[int, ...]] = {}
    live: list[tuple[BlockTable, list[int], int]] = []

    def write(table: BlockTable, prompt: list[int], begin: int, end: int) -> None:
        for name in ("full", "window"):
            for place in range(begin, end):
                block = table.groups[name][place // SIZE]
                assert block != NO_BLOCK
                assert pool.groups[name].holders[block] == 1
                memory[name, block, place % SIZE] = prompt[place]
        if "state" in kinds:
            states[table.groups["state"][0]] = tuple(prompt[:end])

    def check(table: BlockTable, prompt: list[int], computed: int) -> None:
        for name in ("full", "window"):
            for place in range(pool.groups[name].kind.first_visible(computed), computed):
                assert memory[name, table.groups[name][place // SIZE], place % SIZE] == prompt[place]
        if "state" in kinds and computed:
            assert states[table.groups["state"][0]] == tuple(prompt[:computed])

    for _ in range(1500):
        if chance.random() < 0.4 or not live:
            stem = tokens(chance.randrange(30), chance.randrange(3))
            prompt = [*stem, *(chance.randrange(500) for _ in range(chance.randrange(1, 6)))]
            admission = pool.admit("x", prompt, chain(), 8)
            if admission is not None:
                for copy in admission.copies:
                    for place in range(SIZE):
                        key = (copy.group, copy.source, place)
                        if key in memory:
                            memory[copy.group, copy.destination, place] = memory[key]
                    if copy.group == "state":
                        states[copy.destination] = states[copy.source]
                pool.copied(admission.copies)
                check(admission.table, prompt, admission.cached_tokens)
                live.append((admission.table, prompt, admission.cached_tokens))
        else:
            number = chance.randrange(len(live))
            table, prompt, computed = live.pop(number)
            end = min(len(prompt), computed + chance.randrange(1, 9))
            pool.trim(table, computed)
            if computed < len(prompt) and pool.extend(table, end, computed):
                write(table, prompt, computed, end)
                pool.publish(table, prompt, end, chain())
                if "state" in kinds and end % SIZE == 0:
                    digest = chain().of(prompt, end // SIZE)[end // SIZE - 1]
                    copies = pool.keep_states(table, digest)
                    for copy in copies:
                        states[copy.destination] = states[copy.source]
                    pool.kept(copies, digest)
                live.append((table, prompt, end))
            else:
                pool.publish_tail(table, prompt, computed, chain())
                pool.free(table)
        pool.validate()
    for table, _, _ in live:
        pool.free(table)
    assert pool.num_free == 14 * len(kinds)
