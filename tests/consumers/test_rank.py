"""Inside a side queue a request that came back from a delay goes first, and its requester's own priority is kept."""

import pytest

from consumers.rank import HIGHEST, original_priority, rank

SAID = (None, *range(HIGHEST + 1))


@pytest.mark.parametrize("priority", SAID)
def test_requests_that_come_back_go_before_all_fresh_ones(priority: int | None) -> None:
    back = rank(priority, is_fresh=False)
    assert back is not None
    assert back > max(rank(each, is_fresh=True) or 0 for each in SAID)


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("priority", SAID)
def test_the_requesters_priority_is_restored(priority: int | None, is_fresh: bool) -> None:
    assert original_priority(rank(priority, is_fresh=is_fresh)) == priority


def test_requests_that_come_back_keep_the_order_of_their_priorities() -> None:
    found = [rank(each, is_fresh=False) or 0 for each in range(HIGHEST + 1)]
    assert found == sorted(set(found))


def test_the_highest_priority_is_that_of_the_brokers_queues() -> None:
    assert original_priority(rank(9, is_fresh=False)) == 9
    assert rank(10, is_fresh=False) == rank(200, is_fresh=False) == rank(9, is_fresh=False)


def test_a_priority_that_no_worker_sets_counts_as_none() -> None:
    assert original_priority(255) is None
