"""docs/limits.md has every fixed limit with the value that the code has."""

import pytest

from tests.support.limits_page import NO_LIMITS, PAGE, Limit, limits, numbers, page, said


def test_docs_limits_is_generated_from_the_code() -> None:
    assert page() == PAGE.read_text(), "a limit has changed; if that is right: python -m tests.support.limits_page"


@pytest.mark.parametrize("limit", limits(), ids=lambda each: f"{each.path}:{each.name}")
def test_each_limit_says_what_it_limits(limit: Limit) -> None:
    assert limit.text.endswith("."), "write a sentence in a docstring below the constant"


def test_what_is_left_out_of_the_page_is_in_the_code() -> None:
    assert {path: names & set(numbers(path)) for path, names in NO_LIMITS.items()} == NO_LIMITS


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("A_S", 0.0005, "0.5 ms"),
        ("A_S", 0.25, "250 ms"),
        ("A_S", 2.5, "2.5 s"),
        ("A_S", 60, "60 s"),
        ("A_S", 1200.0, "20 min"),
        ("A_S", 3601, "3601 s"),
        ("A_MS", 60_000, "60 s"),
        ("A_MS", 86_400_000, "1 day"),
        ("A_NS", 5_000_000, "5 ms"),
        ("A_BYTES", 800, "800 bytes"),
        ("A_BYTES", 16 << 20, "16 MiB"),
        ("A_BYTES_S", 256 << 10, "256 KiB/s"),
        ("PAUSES_S", (1, 2, 30), "1, 2, 30 s"),
        ("WAITING", 1000, "1000"),
        ("WAITING", 10_000, "10,000"),
        ("PART", 0.05, "0.05"),
    ],
)
def test_a_value_is_shown_with_its_unit(name: str, value: float, shown: str) -> None:
    assert said(name, value) == shown
