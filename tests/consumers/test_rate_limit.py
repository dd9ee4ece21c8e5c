"""What one tenant may use of something that all share, and how often its excess is told. The clock is the test's."""

import pytest
import structlog

from consumers import rate_limit
from consumers.rate_limit import LogThrottle, Parking, RateLimit
from lanekeeper.telemetry import signals


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_a_limit_holds_so_much_at_once_and_gains_with_time() -> None:
    clock = Clock()
    some = RateLimit(per_s=2, at_once=3, clock=clock)

    assert [some.take("a") for _ in range(4)] == [True, True, True, False]
    clock.now_s += 0.25
    assert not some.take("a")
    clock.now_s += 0.25
    assert [some.take("a") for _ in range(2)] == [True, False]
    clock.now_s += 1000
    assert [some.take("a", 3), some.take("a", 0.5)] == [True, False]


def test_what_is_refused_uses_nothing() -> None:
    some = RateLimit(per_s=1, at_once=3, clock=Clock())

    assert [some.take("a", each) for each in (4, 3.5, 3, 0.1)] == [False, False, True, False]


def test_an_incident_is_logged_at_once_and_then_once_a_minute_with_the_count() -> None:
    clock = Clock()
    throttle = LogThrottle(clock=clock)

    assert [throttle.count("a") for _ in range(4)] == [1, 0, 0, 0]
    clock.now_s += 59.5
    assert throttle.count("a") == 0
    clock.now_s += 0.5
    assert [throttle.count("a") for _ in range(2)] == [5, 0]
    assert throttle.count("b") == 1


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


def test_a_tenant_has_its_messages_kept_up_to_its_share_and_other_tenants_still_have_theirs() -> None:
    parking = Parking(invalid_per_hour=3)

    assert kept(parking, "a", 1, 1, 1, 1) == [True, True, True, False]
    assert kept(parking, "b", 1) == [True]


@pytest.mark.parametrize(("size", "most"), [(0, 4), (64 * KIB - 1, 4), (64 * KIB + 1, 2), (192 * KIB + 1, 1)])
def test_a_large_message_counts_as_several(size: int, most: int) -> None:
    assert kept(Parking(invalid_per_hour=4), "a", *[size] * 5).count(True) == most


def test_messages_that_are_not_kept_are_counted_and_logged_once_a_minute() -> None:
    parking = Parking(invalid_per_hour=1)
    with structlog.testing.capture_logs() as logs:
        kept(parking, "a", 1, 1, 1, 1)

    assert parking.unparked == 3
    (told,) = logs
    assert told["event"] == signals.INVALID_UNPARKED
    assert (told["tenant"], told["code"], told["count"], told["unparked"]) == ("a", "invalid_request", 1, 1)
