"""Pauses between attempts to connect."""

import pytest

from lanekeeper.amqp.driver.backoff import LEAST_S, pause_s


@pytest.mark.parametrize("failures", [0, 3, 1024, 100_000])
def test_a_pause_is_bounded_after_any_number_of_failures(failures: int) -> None:
    for _ in range(50):
        assert LEAST_S <= pause_s(failures, first_s=0.25, cap_s=2.5) <= 2.5


def test_pauses_grow_to_the_cap() -> None:
    assert max(pause_s(0, first_s=0.25, cap_s=2.5) for _ in range(50)) <= 0.25
    assert max(pause_s(1024, first_s=0.25, cap_s=2.5) for _ in range(200)) > 1.25
