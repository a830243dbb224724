"""What is checked of memory before a transport takes it."""

from __future__ import annotations

import resource

import pytest

from connector.transport.base import Memory
from connector.transport.registration import pinning_advice, refusal, why_unusable

MAPS = """\
1000-3000 rw-s 00000000 00:01 7 /memfd:pool (deleted)
3000-4000 rw-p 00000000 00:00 0
4000-5000 r--p 00000000 00:00 0 [vvar]
7000-9000 rw-p 00000000 00:00 0
"""


def memory(address: int, length: int) -> Memory:
    return Memory(address=address, length=length, fd=None)


@pytest.mark.parametrize(
    ("address", "length", "wrong"),
    [
        (0x1000, 0x3000, ""),
        (0x2FFF, 2, ""),
        (0x8FFF, 1, ""),
        (0x1000, 0x3001, "0x4000 may not be read and written (it is mapped r--p)"),
        (0xFFF, 2, "nothing is mapped at 0xfff; register memory after it has been mapped, with its length"),
        (0x7000, 0x2001, "nothing is mapped at 0x9000; register memory after it has been mapped, with its length"),
        (0x6000, 0x1001, "nothing is mapped at 0x6000; register memory after it has been mapped, with its length"),
        (0x1000, 0, "a region has at least one byte, not 0"),
        (0x1000, -1, "a region has at least one byte, not -1"),
    ],
)
def test_every_byte_has_to_be_mapped_for_reading_and_writing(address: int, length: int, wrong: str) -> None:
    assert why_unusable(memory(address, length), MAPS) == wrong


def test_this_process() -> None:
    assert why_unusable(memory(id(MAPS), 8)) == ""
    assert why_unusable(memory(0, 8)).startswith("nothing is mapped at 0x0")


def test_a_refusal_names_the_region_and_the_cause() -> None:
    error = refusal("decode-0", "ucx", 3, memory(0x1000, 4096), "Input/output error")
    assert str(error) == ("decode-0: ucx cannot register region 3, memory at 0x1000 (4096 bytes): Input/output error")


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 4096, 5000])
def test_there_is_no_advice_when_the_limit_allows_it(limit: int) -> None:
    assert pinning_advice(4096, limit) == ""


def test_a_limit_that_is_too_low_is_said_with_what_to_do() -> None:
    advice = pinning_advice(4097, 4096)
    assert "RLIMIT_MEMLOCK allows 4096 bytes: set it to unlimited (ulimit -l unlimited" in advice
