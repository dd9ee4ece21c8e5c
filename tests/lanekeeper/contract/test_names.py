import pytest

from lanekeeper import Names


@pytest.mark.parametrize(
    ("queue", "lane"),
    [
        ("lane.normal.due", "normal"),
        ("lane.normal.side.07", "normal"),
        ("lane.normal", None),
        ("lane.normal.dues", None),
        ("other.normal.due", None),
    ],
)
def test_only_due_and_side_queues_are_behind_a_lane(queue: str, lane: str | None) -> None:
    assert Names().lane_behind(queue) == lane
