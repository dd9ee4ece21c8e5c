"""How long to wait before trying the broker again."""

import random

LEAST_S = 0.05
DOUBLED_AT_MOST = 10
"""Without this bound, 2 ** failures overflowed a float after 1024 failures; the error ended all further tries."""


def pause_s(failures: int, *, first_s: float, cap_s: float) -> float:
    """The pause in seconds: random, from 0 to `first_s` doubled with each failure, and at most `cap_s` (full
    jitter)."""
    return random.uniform(LEAST_S, min(cap_s, first_s * 2 ** min(failures, DOUBLED_AT_MOST)))
