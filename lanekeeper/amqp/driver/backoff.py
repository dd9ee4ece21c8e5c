"""Computes the pause before a failed operation, such as connecting to the broker or calling the gateway, is tried
again."""

import random

LEAST_S = 0.05
"""The shortest pause, in seconds, before a failed operation is tried again."""
MAX_DOUBLINGS = 10
"""The largest number of times that the upper limit of the pause between two tries is doubled. Without this maximum,
`2 ** failures` overflows a float after 1024 failures."""


def pause_s(failures: int, *, first_s: float, cap_s: float) -> float:
    """The pause in seconds before the next try: exponential back-off with full jitter. It is a random number from
    `LEAST_S` to an upper limit. This limit is `first_s` at first, doubles with each failure, and is at most `cap_s`."""
    return random.uniform(LEAST_S, min(cap_s, first_s * 2 ** min(failures, MAX_DOUBLINGS)))
