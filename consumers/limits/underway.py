"""The calls of an account that are under way, and what a refusal may owe to them. Pure; time is passed in.

A provider estimates a request's input when its call begins, and corrects that when it ends: until then it may hold more
than we reserved. So a refusal that the account did not foresee may be one large request's, or what is held of many.
"""

from math import inf

from consumers.limits.base import Reservation
from consumers.limits.burst import MARGIN_MOST, PATIENCE_S

HELD_EVERY_S = 60.0
"""Held input explains refusals at most once in this time. If refusals go on, the cause is another."""


class Underway:
    """Granted and not yet settled."""

    __slots__ = ("_calls", "_held_s")

    def __init__(self) -> None:
        self._calls: dict[int, Reservation] = {}
        self._held_s = -inf

    def begin(self, reservation: Reservation) -> None:
        self._calls[id(reservation)] = reservation

    def end(self, reservation: Reservation) -> None:
        self._calls.pop(id(reservation), None)

    def needs(self, left: float) -> bool:
        """True if one of the calls may need more input than was left."""
        return left < (1 + MARGIN_MOST) * max((each.amounts.input_tokens for each in self._calls.values()), default=0.0)

    def hold(self, missing: float, now_s: float) -> bool:
        """Whether they may hold the input that was missing when a call was refused; then it comes back as they end."""
        running = sum(each.amounts.input_tokens for each in self._calls.values())
        is_same = 0 <= now_s - self._held_s < PATIENCE_S
        if not 0 < missing <= MARGIN_MOST * running or not (is_same or now_s - self._held_s > HELD_EVERY_S):
            return False
        if not is_same:
            self._held_s = now_s
        for each in self._calls.values():
            amount = each.amounts.input_tokens
            each.amounts = each.amounts._replace(input_tokens=amount * (1 + missing / running))
        return True
