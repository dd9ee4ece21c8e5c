"""The pause before a failed operation is tried again."""

import random

LEAST_S = 0.05
MAX_DOUBLINGS = 10
"""Without it, `2 ** failures` overflows a float after 1024 failures."""


def pause_s(failures: int, *, first_s: float, cap_s: float) -> float:
    """Exponential back-off with full jitter: from `LEAST_S` to `first_s`, doubled with each failure up to `cap_s`."""
    return random.uniform(LEAST_S, min(cap_s, first_s * 2 ** min(failures, MAX_DOUBLINGS)))
