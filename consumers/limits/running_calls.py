"""Knows the running calls of an account, and decides whether they explain why the provider refuses a further call
(429). Without I/O; times are passed in.

A provider estimates a request's input tokens when its call begins, and corrects the estimate when the call ends. Until
then it may count more tokens for the call than we have reserved. So an unexpected refusal may be caused by the estimate
for one large request, or by the sum of the estimates for many running calls.
"""

from math import inf

from consumers.limits.base import Reservation
from consumers.limits.burst import MARGIN_MOST, PATIENCE_S

HELD_EVERY_S = 60.0
"""Running calls are accepted as the cause of a refusal (429) at most once in this many seconds. If calls are refused
again sooner, there must be another cause."""


class RunningCalls:
    """The reservations of an account's running calls, which may explain why the provider refuses a further call."""

    def __init__(self) -> None:
        self._calls: dict[int, Reservation] = {}
        self._held_s = -inf

    def begin(self, reservation: Reservation) -> None:
        self._calls[id(reservation)] = reservation

    def end(self, reservation: Reservation) -> None:
        self._calls.pop(id(reservation), None)

    def shift(self, jump_s: float) -> None:
        self._held_s += jump_s
        for reservation in self._calls.values():
            reservation.at_s += jump_s

    def needs(self, left: float) -> bool:
        """True if one of the running calls may need more input tokens than are left of the limit (`left`)."""
        largest = max((reservation.amounts.input_tokens for reservation in self._calls.values()), default=0.0)
        return left < (1 + MARGIN_MOST) * largest

    def hold(self, missing: float, now_s: float) -> bool:
        """Decide whether the running calls explain a refusal: the provider may count `missing` more input tokens for
        them than were reserved. If so, raise the reservations of these calls by `missing` tokens in total, and return
        True. Otherwise return False."""
        running = sum(reservation.amounts.input_tokens for reservation in self._calls.values())
        is_same = 0 <= now_s - self._held_s < PATIENCE_S
        if not 0 < missing <= MARGIN_MOST * running or not (is_same or now_s - self._held_s > HELD_EVERY_S):
            return False
        if not is_same:
            self._held_s = now_s
        for reservation in self._calls.values():
            amount = reservation.amounts.input_tokens
            reservation.amounts = reservation.amounts._replace(input_tokens=amount * (1 + missing / running))
        return True
