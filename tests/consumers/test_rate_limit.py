"""What one tenant may use of something that all share, and how often its excess is told. The clock is the test's."""

import pytest

from consumers import rate_limit
from consumers.rate_limit import LogThrottle, Parking, RateLimit


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_the_tenant_that_asked_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "NAMES_KEPT", 2)
    some, throttle = RateLimit(per_s=0, at_once=1, clock=Clock()), LogThrottle(clock=Clock())
    for name in ("a", "b", "a", "c"):
        some.take(name)
        throttle.count(name)

    assert [some.take(name) for name in ("a", "b")] == [False, True]
    some, throttle = RateLimit(per_s=0, at_once=1, clock=Clock()), LogThrottle(clock=Clock())
    assert [throttle.count(name) for name in ("a", "b", "a", "c", "a", "b")] == [1, 1, 0, 1, 0, 1]


KIB = 1024


def kept(parking: Parking, tenant: str, *sizes: int) -> list[bool]:
    return [parking.takes(tenant, each, code="invalid_request") for each in sizes]


@pytest.mark.parametrize(("size", "most"), [(0, 4), (64 * KIB - 1, 4), (64 * KIB + 1, 2), (192 * KIB + 1, 1)])
def test_a_large_message_counts_as_several(size: int, most: int) -> None:
    assert kept(Parking(invalid_per_hour=4), "a", *[size] * 5).count(True) == most
