"""The default lanes and their numbers, as the documentation states them, and what follows from a lane's slots."""

from typing import Any

import pytest

from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES, MOST_LANES, NORMAL, BatchSpec, LaneSpec, nearest, usual

GIB = 1_073_741_824


def like_critical(**changed: Any) -> LaneSpec:
    return LaneSpec(
        **{"name": "mine", "rank": 1, "slots": 16, "call_timeout_s": 60, "deadline_s": 120, "deadline_max_s": 3600,
           "max_attempts": 4, "model": "m", "max_length": 10, **changed}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lane", "rank", "slots", "times_s", "attempts", "model", "length"),
    [
        (CRITICAL, 10, (16, 2, 128), (1, 60, 120, 3600), 4, "claude-sonnet-5-5", 10_000),
        (NORMAL, 20, (8, 1, 64), (10, 120, 600, 3600), 5, "claude-sonnet-5-5", 100_000),
        (BATCH, 30, (4, 1, 32), (60, 300, 86_400, 86_400), 8, "claude-haiku-5-5", 1_000_000),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_default_lanes_have_their_numbers(
    lane: LaneSpec, rank: int, slots: Any, times_s: Any, attempts: int, model: str, length: int
) -> None:
    assert (lane.rank, lane.max_attempts, lane.model) == (rank, attempts, model)
    assert (lane.slots, lane.reserved_slots, lane.most_slots) == slots
    assert (lane.target_wait_s, lane.call_timeout_s, lane.deadline_s, lane.deadline_max_s) == times_s
    assert (lane.max_length, lane.max_length_bytes, lane.max_tokens, lane.side_queues) == (length, GIB, 1024, 8)
    assert (lane.models, lane.batches.enabled) == (None, lane is BATCH)


def test_a_lane_of_ones_own_has_the_target_of_normal_and_no_batches() -> None:
    assert like_critical().target_wait_s == 10
    assert not like_critical().batches.enabled


def test_batches_are_gathered_by_their_documented_numbers() -> None:
    spec = BatchSpec()

    assert (spec.count, spec.bytes, spec.window_s) == (500, 8_000_000, 20)
    assert (spec.least_s, spec.promote_s, spec.first_poll_s) == (7200, 1800, 30)


@pytest.mark.parametrize(
    ("given", "reserved", "most", "due", "most_due"),
    [
        ({"slots": 1}, 1, 8, 1, 2),
        ({"slots": 7}, 1, 56, 1, 14),
        ({"slots": 8}, 1, 64, 2, 16),
        ({"slots": 16}, 2, 128, 4, 32),
        ({"slots": 16, "slots_min": 5, "slots_max": 40}, 5, 40, 4, 10),
        ({"slots": 3, "slots_min": 0, "slots_max": 3}, 0, 3, 1, 1),
    ],
)
def test_what_follows_from_a_lanes_slots(given: Any, reserved: int, most: int, due: int, most_due: int) -> None:
    lane = like_critical(**given)

    assert (lane.reserved_slots, lane.most_slots) == (reserved, most)
    assert (lane.due_slots, lane.most_due_slots) == (due, most_due)


def test_the_usual_lane_is_normal_or_the_nearest_of_two_the_less_urgent_one() -> None:
    assert usual(DEFAULT_LANES) is NORMAL
    assert usual((CRITICAL, BATCH)) is BATCH
    assert nearest(DEFAULT_LANES, 14) is CRITICAL
    assert MOST_LANES == 16
