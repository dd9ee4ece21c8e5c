"""How long a request may wait for its budget in a slot of its lane."""

from consumers.gates.waiting_room import WaitingRoom

SLOTS = 3


def enter(room: WaitingRoom, *accounts: str, lane: str = "normal", slots: int = SLOTS) -> list[float | None]:
    return [room.enter(lane, each, slots=slots) for each in accounts]


def test_requests_for_one_account_may_wait_in_all_slots_but_one() -> None:
    room = WaitingRoom()
    assert enter(room, "a", "a", "a") == [None, None, 0.25]
    assert enter(room, "b") == [None]
    assert enter(room, "a", lane="batch") == [None]


def test_in_a_lane_with_a_single_slot_one_request_may_wait() -> None:
    assert enter(WaitingRoom(), "a", "a", slots=1) == [None, 0.25]
    assert enter(WaitingRoom(), "a", "a", slots=2) == [None, 0.25]


def test_while_only_requests_for_one_account_follow_the_moments_double_up_to_fifteen_seconds() -> None:
    room = WaitingRoom()
    enter(room, "a", "a")
    found = []
    for _ in range(9):
        found += enter(room, "a")
        room.leave("normal", "a")
    assert found == [0.25, 0.5, 1, 2, 4, 8, 15, 15, 15]


def test_a_request_for_another_account_makes_the_moments_short_again() -> None:
    room = WaitingRoom()
    enter(room, "a", "a", "a", "a")
    enter(room, "b")
    assert enter(room, "a") == [0.25]


def test_a_request_that_is_granted_at_once_makes_them_short_again_if_others_wait_for_another_account() -> None:
    room = WaitingRoom()
    enter(room, "a", "a", "a")
    for lane, account in (("normal", "a"), ("batch", "b")):
        room.passed(lane, account)
    assert enter(room, "a") == [0.5]
    room.passed("normal", "b")
    assert enter(room, "a") == [0.25]


def test_who_has_left_takes_no_place() -> None:
    room = WaitingRoom()
    enter(room, "a", "a")
    room.leave("normal", "a")
    assert enter(room, "a", "a") == [None, 0.25]
