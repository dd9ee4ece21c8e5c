"""Status: the answers of several workers and the lengths of the queues, combined."""

from collections.abc import Iterable
from io import StringIO
from typing import Any

import pytest
from ddsketch import DDSketch
from rich.console import Console

from consumers.slots.activity import ACCURACY
from lanekeeper.contract.messages import Depth
from lanekeeper.contract.names import Names
from service.cli.status import _show_status
from service.status import merge, packed_sketch
from topology.delays import LEVELS
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


def test_figures_of_several_workers_are_added_up() -> None:
    answers: list[dict[str, Any]] = [
        {
            "worker": "b:2",
            "lanes": {
                "critical": figures(running=3, longest_s=7, answered=10, throughput_per_min=5),
                "batch": figures(extra_slots=14, slots_limit="itpm", deferred_for={"breaker": 2, "tenant": 1}),
            },
            "dead_letters": {"exported": 2, "dropped": 1},
            "batches": {"waiting": 500, "tickets": 3, "gathered": 700, "late": 2},
            "caps": ["cap lane batch usd"],
            "control": {"refused": 3},
            "undelivered": 4,
        },
        {
            "worker": "a:1",
            "lanes": {
                "critical": figures(running=1, longest_s=90, answered=1, failed=2, retried=4),
                "batch": figures(extra_slots=2, slots_limit=None, deferred_for={"breaker": 3}, waits_since_delivery=7),
            },
            "dead_letters": {"exported": 1, "unparked": 5},
            "batches": {"waiting": 20, "gathered": 20},
            "control": {"displaced": 1},
        },
        {"worker": "of an older version"},
    ]

    status = merge(answers, EMPTY, lanes=LANES, names=NAMES)

    critical, batch = status.lanes
    assert (critical.workers, critical.running, critical.slots, critical.due_slots) == (2, 4, 32, 8)
    assert critical.longest_s == 90
    assert (critical.answered, critical.failed, critical.retried, critical.throughput_per_min) == (11, 2, 4, 5)
    assert (batch.slots, batch.extra_slots, batch.slots_limit, batch.waits_since_delivery) == (48, 16, "itpm", 7)
    assert batch.deferred_for == {"breaker": 5, "tenant": 1}
    assert status.workers == ("a:1", "b:2", "of an older version")
    assert status.dead_letters == {"exported": 3, "dropped": 1, "unparked": 5}
    assert (status.batches, status.batch_tickets) == ({"gathered": 720, "late": 2}, 3)
    assert status.caps == ("cap lane batch usd",)
    assert merge(answers, {**EMPTY, "lane.batches": Depth(7, 1)}, lanes=LANES, names=NAMES).in_batches == 527
    assert (status.control, status.undelivered) == ({"refused": 3, "displaced": 1}, 4)


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


def test_what_waits_in_delays_is_added_up_by_reason_and_compared_with_the_broker() -> None:
    until_midnight = {"daily cap": {"count": 80, "last_in_s": 3600}}
    answers = [
        {"worker": "a", "lanes": {"batch": figures(delayed_for=until_midnight)}},
        {"worker": "b", "lanes": {"batch": figures(delayed_for={"daily cap": {"count": 6, "last_in_s": 3601}})}},
    ]
    found = {**EMPTY, **{f"lane.delay.{level:02}": Depth(3, 0) for level in range(LEVELS)}, "lane.dead": Depth(2, 0)}

    status = merge(answers, found, lanes=LANES, names=NAMES)

    assert status.lanes[1].delayed == 86
    assert status.lanes[1].delayed_for == {"daily cap": {"count": 86, "last_in_s": 3601}}
    assert (status.in_delays, status.dead) == (3 * LEVELS, 2)
    assert status.in_batches is None
    assert merge(answers, EMPTY, lanes=LANES, names=NAMES).dead is None


def test_waits_for_the_same_account_are_shown_in_one_line() -> None:
    def waits(**lanes: tuple[int, str, float]) -> dict[str, Any]:
        told = {lane: dict(zip(("count", "reason", "oldest_s"), each, strict=True)) for lane, each in lanes.items()}
        rpm = {"limit": 50.0, "left": 0.0, "used": 50.0}
        return {
            "worker": "a",
            "lanes": {},
            "waiting": {"anthropic/sonnet": told},
            "accounts": {"anthropic/sonnet": {"rpm": rpm}},
        }

    answers = [
        waits(batch=(4, "rpm", 1.25), critical=(1, "itpm", 0.1)),
        waits(batch=(3, "rpm", 7.5)),
        waits(batch=(2, "otpm", 0.5)),
    ]

    assert merge(answers, EMPTY, lanes=LANES, names=NAMES).waiting == (
        "batch: 2 wait for otpm of anthropic/sonnet; the first for 0.5 s",
        "batch: 7 wait for rpm of anthropic/sonnet, whose limit is 50; the first for 7.5 s",
        "critical: 1 wait for itpm of anthropic/sonnet; the first for 0.1 s",
    )


def test_a_paused_provider_is_shown_once_with_the_reason() -> None:
    pause = {"reason": "it refuses the key", "error": "authentication_error 401", "for_s": 60.0, "probe_in_s": 5.0}
    answers = [
        {"worker": "a", "lanes": {}, "paused": {"anthropic": pause}},
        {"worker": "b", "lanes": {}, "paused": {"anthropic": {**pause, "for_s": 50.0}}},
        {"worker": "of an older version", "lanes": {}},
    ]

    assert merge(answers, EMPTY, lanes=LANES, names=NAMES).paused == (
        "anthropic: paused for 60 s: it refuses the key (authentication_error 401), probed again in 5 s",
    )


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


def test_a_lane_that_no_worker_serves_shows_only_its_depth() -> None:
    found = {**EMPTY, "lane.batch": Depth(7, 2), "lane.batch.due": Depth(3, 1)}
    answers = [{"worker": "a", "lanes": {"critical": figures()}}]

    batch = merge(answers, found, lanes=LANES, names=NAMES).lanes[1]

    assert (batch.depth, batch.consumers, batch.workers) == (10, 2, 0)
    assert batch.running is batch.throughput_per_min is None
    assert batch.wait_ms is None


def test_workers_with_a_simulated_provider_spend_no_dollars() -> None:
    spent: dict[str, Any] = {"spent": {"lane": {"critical": {"requests": 1, "usd": 0.5}}}, "lanes": {}}
    answers = [{"worker": "a", "simulated": True, **spent}, {"worker": "b", **spent}]

    both = merge(answers, EMPTY, lanes=LANES, names=NAMES)
    alone = merge(answers[:1], EMPTY, lanes=LANES, names=NAMES)

    assert both.spent["lane"]["critical"]["usd"] == 0.5
    assert both.simulated == ("a",)
    assert alone.spent == {}


def test_what_batches_saved_is_printed_by_lane() -> None:
    spent = {"lane": {"batch": {"usd": 0.02, "saved_usd": 0.02}, "critical": {"usd": 1.0, "saved_usd": 0.0}}}
    answers = [{"worker": name, "lanes": {}, "spent": spent, "prices_as_of": "2026-11-21"} for name in "ab"]
    console = Console(file=StringIO(), width=80)

    _show_status(merge(answers, EMPTY, lanes=LANES, names=NAMES), console)

    assert isinstance(console.file, StringIO)
    assert "saved by providers' batches: batch $0.0400\n" in console.file.getvalue()


def test_the_printed_status_names_why_requests_failed_last_and_a_worker_that_hangs() -> None:
    def printed(answers: list[dict[str, Any]], consumers: int) -> str:
        found = {**EMPTY, "lane.batch": Depth(3, consumers)}
        console = Console(file=StringIO(), width=80)
        _show_status(merge(answers, found, lanes=LANES, names=NAMES), console)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    failures = [{"at_ms": at, "lane": "batch", "code": "deadline_exceeded"} for at in (1, 2)]
    failures.append({"at_ms": 3, "lane": "critical", "code": "poison"})
    running = printed([{"worker": "a", "lanes": {}, "failures": failures}], consumers=1)
    assert "batch: deadline_exceeded ended 2 of the last 3 requests that failed" in running
    assert "critical: poison ended 1 of the last 3" in running
    assert "No worker answered, but queues have consumers: a worker hangs" in printed([], consumers=1)
    assert "No worker answered: start one" in printed([], consumers=0)
