"""How many invalid messages of a tenant are kept, by number and by size."""

import pytest
import structlog

from consumers.parking import Parking
from lanekeeper.telemetry import signals

KIB = 1024


def kept(parking: Parking, tenant: str, *sizes: int) -> list[bool]:
    return [parking.takes(tenant, each, code="invalid_request") for each in sizes]


def test_a_tenant_has_its_messages_kept_up_to_its_share_and_other_tenants_still_have_theirs() -> None:
    parking = Parking(invalid_per_hour=3)

    assert kept(parking, "a", 1, 1, 1, 1) == [True, True, True, False]
    assert kept(parking, "b", 1) == [True]


def test_a_tenant_may_have_a_thousand_at_once() -> None:
    assert 1000 <= kept(Parking(), "a", *[1] * 1100).count(True) <= 1010  # some come back during the test


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
