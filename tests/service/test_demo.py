"""The demo's third act fails if a promise is not kept."""

from dataclasses import replace
from typing import Any

import pytest

from service.demo import BudgetRun

SPENT = BudgetRun(waits_ms=[10] * 20, answered=75, refused=0, used=0.94)
UNGATED = BudgetRun(used=1.02)


@pytest.mark.parametrize(
    "broken", [{"refused": 1}, {"used": 0.5}, {"waits_ms": [10] * 18 + [5000] * 2}, {"wrong": ["critical 1: refused"]}]
)
def test_the_budget_act_passes_only_without_429_with_short_waits_and_most_of_it_used(broken: dict[str, Any]) -> None:
    assert SPENT.is_well(UNGATED)
    assert not replace(SPENT, **broken).is_well(UNGATED)


def test_a_busy_machine_is_no_fault_of_the_budget_act() -> None:
    used_half = replace(SPENT, used=0.5)
    assert used_half.is_well(replace(UNGATED, used=0.55))
    assert not used_half.is_well(replace(UNGATED, used=0.7))
    slow = replace(SPENT, waits_ms=[3000] * 20)
    assert slow.is_well(replace(UNGATED, waits_ms=[10_000] * 20))
    assert not slow.is_well(replace(UNGATED, waits_ms=[8000] * 20))
