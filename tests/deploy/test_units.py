import pytest

from deploy.units import parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1073741824", 1 << 30),
        ("1GiB", 1 << 30),
        ("1.5 MiB", 3 << 19),
        ("2kB", 2000),
        ("7B", 7),
        (" 1 GB ", 10**9),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("30", 30.0), ("500ms", 0.5), ("1.5s", 1.5), ("2min", 120.0), ("1h", 3600.0), (".5", 0.5)]
)
def test_durations_are_read_with_their_unit(text: str, expected: float) -> None:
    assert parse_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "GiB", "1gib", "-1", "1 G", "1e9", "nan", "1GiB 2"])
def test_what_is_no_size_is_refused_with_the_known_units(text: str) -> None:
    with pytest.raises(ValueError, match="KiB, MiB, GiB"):
        parse_bytes(text)


def test_a_fraction_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of bytes"):
        parse_bytes("0.3")


def test_an_unknown_unit_of_time_is_refused() -> None:
    with pytest.raises(ValueError, match="ms, s, min, h"):
        parse_seconds("3 days")
