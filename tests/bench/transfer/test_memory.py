"""The proof that bytes have moved finds what has not."""

from collections.abc import Iterator

import numpy as np
import pytest

from bench.errors import WrongBytes
from bench.transfer.memory import MappedMemory, check_pattern, erase, write_pattern

PAGE = 4096
SENT = np.array([3, 0, 7], dtype=np.int32)
LANDED = np.array([1, 6, 2], dtype=np.int32)


@pytest.fixture
def memories() -> Iterator[tuple[MappedMemory, MappedMemory]]:
    here, there = (MappedMemory.create(name, 8 * PAGE) for name in ("here", "there"))
    yield here, there
    here.close()
    there.close()


def copy(source: MappedMemory, destination: MappedMemory) -> None:
    destination.array.reshape(-1, PAGE)[LANDED] = source.array.reshape(-1, PAGE)[SENT]


def test_copied_pages_pass(memories: tuple[MappedMemory, MappedMemory]) -> None:
    here, there = memories
    write_pattern(here, PAGE, SENT, seed=5)
    copy(here, there)
    check_pattern(there, PAGE, LANDED, 5, "it")


def test_another_mapping_of_the_memory_sees_the_same_bytes(memories: tuple[MappedMemory, MappedMemory]) -> None:
    here, _ = memories
    write_pattern(here, PAGE, SENT, seed=5)
    check_pattern(MappedMemory(here.fd), PAGE, SENT, 5, "it")


def test_a_single_wrong_word_is_found_and_named(memories: tuple[MappedMemory, MappedMemory]) -> None:
    here, there = memories
    write_pattern(here, PAGE, SENT, seed=5)
    copy(here, there)
    there.array[6 * PAGE + 80] ^= 1
    with pytest.raises(WrongBytes, match=r"it: page 1 of 3 \(id 6\) differs .* in 1 of 512 words, first at byte 80"):
        check_pattern(there, PAGE, LANDED, 5, "it")


@pytest.mark.parametrize("seed", [0, 5])
def test_an_operation_that_does_nothing_is_found(seed: int, memories: tuple[MappedMemory, MappedMemory]) -> None:
    here, there = memories
    write_pattern(here, PAGE, SENT, seed=seed)
    erase(there, PAGE, LANDED)
    with pytest.raises(WrongBytes):
        check_pattern(there, PAGE, LANDED, seed, "it")


def test_pages_in_the_wrong_order_and_those_of_an_earlier_round_are_found(
    memories: tuple[MappedMemory, MappedMemory],
) -> None:
    here, there = memories
    write_pattern(here, PAGE, SENT, seed=5)
    copy(here, there)
    with pytest.raises(WrongBytes):
        check_pattern(there, PAGE, LANDED[::-1], 5, "it")
    with pytest.raises(WrongBytes):
        check_pattern(there, PAGE, LANDED, 6, "it")
