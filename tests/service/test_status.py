"""Status: the answers of several workers and the lengths of the queues, combined."""

from collections.abc import Iterable
from typing import Any

import pytest
from ddsketch import DDSketch

from consumers.slots.activity import ACCURACY
from lanekeeper.contract.messages import Depth
from lanekeeper.contract.names import Names
from service.status import merge, packed_sketch
from topology.lanes import BATCH, CRITICAL

NAMES = Names()
LANES = (CRITICAL, BATCH)
EMPTY = {f"lane.{lane}{suffix}": Depth(0, 0) for lane in ("critical", "batch") for suffix in ("", ".due")}


def figures(**given: Any) -> dict[str, Any]:
    none = {"slots": 16, "due_slots": 4, "running": 0, "answered": 0, "failed": 0, "retried": 0, "deferred": 0}
    return {**none, "throughput_per_min": 0, **given}


def sketch(values: Iterable[int]) -> str:
    found = DDSketch(ACCURACY)
    for value in values:
        found.add(value)
    return packed_sketch(found)


@pytest.mark.parametrize(
    "odd",
    [
        {"lanes": None},
        {"lanes": {"critical": 3}},
        {"lanes": {"critical": {"running": "many"}}},
        {"tenants": {"critical": {"shop": {"running": 1}}}},  # without `in_hand`
        {"tenants": {"critical": {"crm": 1}}},
        {"accounts": {"a": {"rpm": {"limit": 1}}}},
        {"paused": {"a": {}}},
        {"pauses": [{}]},
        {"failures": [{"at_ms": "x"}]},
        {"schedules": {"nightly": None}},
        {"breakers": {"a": "open"}},
        {"control": {"refused": "three"}},
        {"batches": []},
        {"spent": {"lane": {"critical": 1}}},
    ],
)
def test_an_answer_that_cannot_be_read_is_left_out_and_named(odd: dict[str, Any]) -> None:
    first = {
        "worker": "a:1",
        "lanes": {"critical": figures(running=3)},
        "tenants": {"critical": {"crm": {"running": 3, "in_hand": 2}}},
        "accounts": {"a": {"rpm": {"limit": 1, "left": 1, "used": 0}}},
        "spent": {"lane": {"critical": {"usd": 1.0}}},
        "batches": {"waiting": 1},
    }

    status = merge([first, {"worker": "b:2", **odd}, {"worker": "c:3"}], EMPTY, lanes=LANES, names=NAMES)

    assert status.lanes[0].running == 3
    assert status.workers == ("a:1", "c:3")
    assert status.troubles == ("b:2 sends a status that cannot be read",)


def test_a_lane_that_refuses_publishers_is_named() -> None:
    lengths = {**EMPTY, "lane.batch": Depth(BATCH.max_length, 1), "lane.critical": Depth(CRITICAL.max_length - 1, 1)}

    (trouble,) = merge([], lengths, lanes=LANES, names=NAMES).troubles

    assert "lane batch is full (LANEKEEPER_LANES__BATCH__MAX_LENGTH=" in trouble


def test_quantiles_are_computed_over_the_waits_of_all_workers() -> None:
    answers = [
        {"worker": "a", "lanes": {"critical": figures(waits={"5m": sketch(range(1, 51)), "1h": "?"})}},
        {"worker": "b", "lanes": {"critical": figures(waits={"5m": sketch(range(51, 101)), "1h": sketch([7])})}},
        {"worker": "of an older version", "lanes": {"critical": figures()}},
    ]

    critical = merge(answers, EMPTY, lanes=LANES, names=NAMES).lanes[0]

    assert critical.wait_ms is not None
    assert critical.wait_ms["5m"] == {
        "p50": pytest.approx(50, rel=0.03),
        "p95": pytest.approx(95, rel=0.03),
        "p99": pytest.approx(99, rel=0.03),
        "count": 100,
    }
    assert critical.wait_ms["1h"]["count"] == 1


def test_workers_with_a_simulated_provider_spend_no_dollars() -> None:
    spent: dict[str, Any] = {"spent": {"lane": {"critical": {"requests": 1, "usd": 0.5}}}, "lanes": {}}
    answers = [{"worker": "a", "simulated": True, **spent}, {"worker": "b", **spent}]

    both = merge(answers, EMPTY, lanes=LANES, names=NAMES)
    alone = merge(answers[:1], EMPTY, lanes=LANES, names=NAMES)

    assert both.spent["lane"]["critical"]["usd"] == 0.5
    assert both.simulated == ("a",)
    assert alone.spent == {}
