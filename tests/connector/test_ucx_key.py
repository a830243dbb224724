"""The shape of a packed remote key."""

from __future__ import annotations

import pytest

from connector.transport.ucx_key import why_malformed


def key(domains: int, *entries: bytes, kind: int = 0, rest: bytes = b"") -> bytes:
    return domains.to_bytes(8, "little") + bytes([kind]) + b"".join(bytes([len(e)]) + e for e in entries) + rest


@pytest.mark.parametrize(
    "good",
    [
        key(0),
        key(0b1, b"\xff"),
        key(0b1010, b"12345678", b""),
        key(1 << 63, bytes(255), kind=4),
        key(0b1, b"1", rest=b"d"),
        key(0b1, b"1", rest=b"d" + b"123" * 5),
    ],
)
def test_keys_of_the_right_shape(good: bytes) -> None:
    assert why_malformed(good) == ""


@pytest.mark.parametrize(
    ("bad", "wrong"),
    [
        (b"", "it has 0 bytes, at least 9 are needed"),
        (key(0)[:8], "it has 8 bytes, at least 9 are needed"),
        (key(0, kind=5), "there is no kind of memory 5"),
        (key(0b11, b"1"), "it ends within its memory domains, after 11 bytes"),
        (key(0b1, b"123")[:-1], "it ends within its memory domains, after 12 bytes"),
        (key((1 << 64) - 1, b"1"), "it ends within its memory domains, after 11 bytes"),
        (key(0, rest=b"12"), "2 bytes follow its memory domains"),
    ],
)
def test_what_is_wrong_with_others(bad: bytes, wrong: str) -> None:
    assert why_malformed(bad) == wrong
