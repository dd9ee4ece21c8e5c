"""How many invalid messages of a tenant are kept, by number and by size."""

import pytest
import structlog

from consumers.parking import UNIT_BYTES, Parking
from lanekeeper.telemetry import signals


def kept(parking: Parking, tenant: str, *sizes: int) -> list[bool]:
    return [parking.takes(tenant, each, code="invalid_request") for each in sizes]


def test_a_tenant_has_its_messages_kept_up_to_its_share_and_other_tenants_still_have_theirs() -> None:
    parking = Parking(invalid_per_hour=3)

    assert kept(parking, "a", 1, 1, 1, 1) == [True, True, True, False]
    assert kept(parking, "b", 1) == [True]


@pytest.mark.parametrize(("size", "most"), [(0, 4), (UNIT_BYTES - 1, 4), (UNIT_BYTES + 1, 2), (3 * UNIT_BYTES + 1, 1)])
def test_a_large_message_counts_as_several(size: int, most: int) -> None:
    assert kept(Parking(invalid_per_hour=4), "a", *[size] * 5).count(True) == most


def test_those_not_kept_are_counted_and_told_once_a_minute() -> None:
    parking = Parking(invalid_per_hour=1)
    with structlog.testing.capture_logs() as logs:
        kept(parking, "a", 1, 1, 1, 1)

    assert parking.unparked == 3
    (told,) = logs
    assert told["event"] == signals.INVALID_UNPARKED
    assert (told["tenant"], told["code"], told["count"], told["unparked"]) == ("a", "invalid_request", 1, 1)
