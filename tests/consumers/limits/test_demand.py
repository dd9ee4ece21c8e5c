"""How fast lanes have spent lately, which forecasts go by. Time is passed in."""

from math import exp

import pytest

from consumers.limits.base import Amounts
from consumers.limits.demand import Demand

REQUESTS, INPUT, OUTPUT = range(3)
ALL = (0, 1)


def test_what_lanes_spend_is_per_second_of_a_minute_and_by_bucket() -> None:
    demand = Demand(3, now_s=0.0)
    demand.add(0, Amounts(6, 600, 60), 0.0)
    demand.add(1, Amounts(12, 0, 0), 0.0)

    assert [demand.per_s(ALL, each, 0.0) for each in (REQUESTS, INPUT, OUTPUT)] == pytest.approx([0.3, 10.0, 1.0])
    assert demand.per_s((1,), REQUESTS, 0.0) == 0.2
    assert demand.per_s((), REQUESTS, 0.0) == demand.per_s((2,), REQUESTS, 0.0) == 0.0


def test_after_a_minute_what_was_spent_weighs_a_third() -> None:
    demand = Demand(2, now_s=0.0)
    demand.add(0, Amounts(60, 600, 6_000), 0.0)

    assert demand.per_s(ALL, REQUESTS, 60.0) == pytest.approx(exp(-1))
    demand.add(0, Amounts(60, 600, 6_000), 60.0)
    found = [demand.per_s(ALL, each, 120.0) for each in (REQUESTS, INPUT, OUTPUT)]
    assert found == pytest.approx([(1 + exp(-1)) * exp(-1) * per_s for per_s in (1, 10, 100)])


def test_what_was_given_back_is_not_spent_and_less_than_nothing_counts_as_nothing() -> None:
    demand = Demand(2, now_s=0.0)
    demand.add(0, Amounts(60, 60, 60), 0.0)
    demand.add(0, Amounts(-30, -60, -90), 0.0)
    demand.add(1, Amounts(6, 6, 6), 0.0)

    assert [demand.per_s(ALL, each, 0.0) for each in (REQUESTS, INPUT, OUTPUT)] == pytest.approx([0.6, 0.1, 0.1])


def test_a_clock_that_was_set_back_makes_nothing_larger() -> None:
    demand = Demand(1, now_s=100.0)
    demand.add(0, Amounts(60, 0, 0), 100.0)

    assert demand.per_s((0,), REQUESTS, 40.0) == 1.0
    demand.add(0, Amounts(60, 0, 0), 40.0)
    assert demand.per_s((0,), REQUESTS, 40.0) == 2.0


def test_when_the_clock_jumps_nothing_is_forgotten() -> None:
    demand = Demand(1, now_s=0.0)
    demand.add(0, Amounts(60, 0, 0), 0.0)
    demand.shift(600.0)

    assert demand.per_s((0,), REQUESTS, 600.0) == 1.0
    assert demand.per_s((0,), REQUESTS, 660.0) == pytest.approx(exp(-1))
