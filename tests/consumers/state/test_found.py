"""Where a request stands, for those who ask."""

import pytest

from consumers.state.base import Found


@pytest.mark.parametrize(
    ("step", "waiting", "running"),
    [
        ("", "", ""),
        ("summarise, 3 of 10", "summarise, 3 of 10", "summarise, 3 of 10"),
        ("waiting for a batch", "waiting for a batch", ""),
        ("summarise, waiting for a batch", "summarise, waiting for a batch", "summarise"),
    ],
)
def test_a_request_that_runs_does_not_wait_for_a_batch(step: str, waiting: str, running: str) -> None:
    assert Found(completion=None, running=False, step=step).stands == waiting
    assert Found(completion=None, running=True, step=step).stands == running
    assert not Found(completion=None, running=True, step=step).is_in_batch
