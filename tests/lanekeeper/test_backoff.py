from unittest.mock import patch

import pytest

from lanekeeper.backoff import pause_s


@pytest.mark.parametrize(
    ("failures", "cap_s", "most_s"),
    [(0, 5, 0.2), (1, 5, 0.4), (4, 5, 3.2), (5, 5, 5), (10, 1000, 204.8), (10_000, 1000, 204.8)],
)
def test_pauses_are_random_and_double_up_to_their_cap_and_ten_times_at_most(
    failures: int, cap_s: float, most_s: float
) -> None:
    with patch("random.uniform", return_value=0.1) as uniform:
        assert pause_s(failures, first_s=0.2, cap_s=cap_s) == 0.1
    uniform.assert_called_once_with(0.05, pytest.approx(most_s))
