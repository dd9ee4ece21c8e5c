"""How many slots a queue gets in addition to its own: lent ones first, then grown ones; never another lane's
reserve."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.capacity.lending import AT_MOST, ExtraSlots, QueueLoad, decide
from tests.support.examples import examples

CRITICAL = QueueLoad(slots=16, reserved=2, max_slots=128, target_wait_s=1)
NORMAL = QueueLoad(slots=8, reserved=1, max_slots=64, target_wait_s=10)
BATCH = QueueLoad(slots=4, reserved=1, max_slots=32, target_wait_s=60)
FULL = {"critical": replace(CRITICAL, busiest=16), "normal": replace(NORMAL, busiest=8)}


def shares(**seen: QueueLoad) -> dict[str, ExtraSlots]:
    lanes = {"critical": CRITICAL, "normal": NORMAL, "batch": BATCH, **seen}
    return dict(zip(lanes, decide(list(lanes.values())), strict=True))


def flooded(lane: QueueLoad, **given: Any) -> QueueLoad:
    return replace(lane, **{"busiest": lane.slots, "waiting": 500, **given})


def test_nothing_is_lent_to_a_queue_without_waiting_requests() -> None:
    assert set(shares().values()) == {ExtraSlots()}


def test_a_flooded_lane_gets_the_idle_slots_of_all_others_except_their_reserve() -> None:
    assert shares(batch=flooded(BATCH))["batch"] == ExtraSlots(lent=14 + 7)


def test_slots_in_use_are_not_lent_and_the_reserve_is_kept_in_addition() -> None:
    found = shares(critical=replace(CRITICAL, busiest=9), normal=FULL["normal"], batch=flooded(BATCH))
    assert found["batch"] == ExtraSlots(lent=16 - 9 - 2)


def test_no_more_slots_are_lent_than_requests_wait() -> None:
    assert shares(batch=flooded(BATCH, waiting=3))["batch"] == ExtraSlots(lent=3)


def test_the_most_urgent_lane_borrows_first() -> None:
    found = shares(normal=flooded(NORMAL, waiting=10), batch=flooded(BATCH))
    assert (found["normal"], found["batch"]) == (ExtraSlots(lent=10), ExtraSlots(lent=4))


def test_lent_slots_are_returned_as_soon_as_their_lane_needs_them() -> None:
    found = shares(critical=FULL["critical"], normal=FULL["normal"], batch=flooded(BATCH, extra=21, busiest=25))
    assert found["batch"] == ExtraSlots()


def test_a_returned_slot_that_is_still_in_use_is_not_lent_again() -> None:
    batch = replace(BATCH, extra=14, ending=14, busiest=18)
    assert shares(normal=flooded(NORMAL), batch=batch)["normal"] == ExtraSlots(lent=0)


def test_borrowed_slots_that_were_unused_for_a_while_are_returned() -> None:
    assert shares(batch=replace(BATCH, extra=10, grown=10, busiest=6))["batch"] == ExtraSlots(lent=2)
    assert shares(batch=replace(BATCH, extra=10, grown=10, busiest=3))["batch"] == ExtraSlots()


@pytest.mark.parametrize(("slots", "grown", "grows_to"), [(4, 0, 1), (4, 4, 6), (16, 0, 4), (16, 100, 112)])
def test_a_queue_that_waits_too_long_grows_by_a_quarter(slots: int, grown: int, grows_to: int) -> None:
    seen = QueueLoad(
        slots=slots, reserved=1, max_slots=128, target_wait_s=10, extra=grown, grown=grown, waiting=500, wait_s=10.1,
        busiest=slots + grown,
    )  # fmt: skip
    assert shares(**FULL, batch=seen)["batch"] == ExtraSlots(grown=grows_to)


def test_a_queue_does_not_grow_while_its_wait_is_within_the_target() -> None:
    assert shares(**FULL, batch=flooded(BATCH, wait_s=60))["batch"] == ExtraSlots()


def test_a_queue_does_not_grow_while_the_provider_is_the_limit() -> None:
    found = shares(**FULL, batch=flooded(BATCH, extra=5, grown=5, busiest=9, wait_s=300, bottleneck="itpm"))
    assert found["batch"] == ExtraSlots(grown=5, limit="itpm")


def test_nothing_is_lent_while_the_provider_is_the_limit() -> None:
    assert shares(batch=flooded(BATCH, bottleneck="itpm"))["batch"] == ExtraSlots()


def test_a_queue_does_not_grow_beyond_slots_max_and_reports_that() -> None:
    at_most = flooded(BATCH, extra=28, grown=28, busiest=32, wait_s=300)
    assert shares(**FULL, batch=at_most)["batch"] == ExtraSlots(grown=28, limit=AT_MOST)


def test_a_lane_with_slots_max_equal_to_slots_gets_none_but_lends() -> None:
    fixed = replace(CRITICAL, max_slots=16)
    found = shares(critical=flooded(fixed, wait_s=5), batch=flooded(BATCH))
    assert found["critical"] == ExtraSlots(limit=AT_MOST)
    assert shares(critical=fixed, batch=flooded(BATCH))["batch"].lent == 21


def test_borrowed_slots_are_added_before_grown_ones() -> None:
    before = flooded(BATCH, extra=6, grown=6, busiest=10, waiting=0)
    assert shares(batch=before)["batch"] == ExtraSlots(lent=6, grown=0)


@st.composite
def seen(draw: st.DrawFn) -> QueueLoad:
    slots = draw(st.integers(1, 20))
    extra = draw(st.integers(0, 40))
    ending = draw(st.integers(0, extra))
    return QueueLoad(
        slots=slots,
        reserved=draw(st.integers(0, slots)),
        max_slots=slots + draw(st.integers(0, 60)),
        target_wait_s=10,
        extra=extra,
        grown=draw(st.integers(0, extra)),
        ending=ending,
        busiest=draw(st.integers(ending, slots + extra)),
        waiting=draw(st.integers(0, 50)),
        wait_s=draw(st.sampled_from([0.0, 10.0, 11.0])),
        bottleneck=draw(st.sampled_from([None, None, "rpm"])),
    )


@given(st.lists(seen(), min_size=1, max_size=6))
def test_no_reserve_is_lent_no_slot_is_lent_twice_and_no_queue_exceeds_slots_max(queues: list[QueueLoad]) -> None:
    found = decide(queues)

    lendable = sum(max(0, each.slots - each.reserved - each.busiest) for each in queues)
    ending = sum(each.ending for each in queues)
    newly = sum(max(0, share.lent - each.ending) for each, share in zip(queues, found, strict=True))
    assert newly <= max(0, lendable - ending)
    for each, share in zip(queues, found, strict=True):
        assert share.lent >= 0
        assert share.grown >= 0
        assert each.slots + share.total <= each.max_slots
        if each.bottleneck is not None or not each.waiting:
            assert share.total <= each.extra
            assert share.grown <= each.grown
        if each.wait_s <= each.target_wait_s:
            assert share.grown <= each.grown


@st.composite
def lanes_and_demands(draw: st.DrawFn) -> list[tuple[QueueLoad, int]]:
    lanes = []
    for _ in range(draw(st.integers(1, 4))):
        slots = draw(st.integers(1, 16))
        lane = QueueLoad(
            slots=slots,
            reserved=draw(st.integers(0, slots)),
            max_slots=slots + draw(st.integers(0, 30)),
            target_wait_s=1,
            bottleneck=draw(st.sampled_from([None, None, "otpm"])),
        )
        lanes.append((lane, draw(st.integers(0, 60))))
    return lanes


@settings(deadline=None, max_examples=examples(60))
@given(lanes_and_demands(), st.sampled_from([0.0, 5.0]), st.integers(1, 4))
def test_under_constant_load_the_slots_stop_changing(
    world: list[tuple[QueueLoad, int]], wait_s: float, ask_every: int
) -> None:
    """Each lane has a constant number of requests that would run at the same time; decided repeatedly, as the loop
    does."""
    given_now = [ExtraSlots()] * len(world)
    used = [deque([lane.slots], maxlen=6) for lane, _ in world]
    history = []
    for look in range(160):
        found = []
        for (lane, demand), share, past in zip(world, given_now, used, strict=True):
            room = lane.slots + share.total
            past.append(min(demand, room))
            waits = max(0, demand - room) if look % ask_every == 0 else 0
            state: dict[str, Any] = {"extra": share.total, "grown": share.grown, "busiest": max(past), "waiting": waits}
            found.append(replace(lane, wait_s=wait_s, **state))
        before, given_now = given_now, decide(found)
        for (lane, _), was, share, past in zip(world, before, given_now, used, strict=True):
            if share.total > was.total:
                past.append(lane.slots + share.total)
        history.append([(share.lent, share.grown) for share in given_now])
    assert all(each == history[-1] for each in history[-40:])
    lent = sum(share.lent for share in given_now)
    assert lent <= sum(max(0, lane.slots - lane.reserved - min(demand, lane.slots)) for lane, demand in world)
