"""The calls of an account that are under way, and whether they explain a refusal. Pure; time is passed in.

A provider estimates a request's input when its call begins, and corrects that when it ends: until then it may hold more
than we reserved. So the cause of an unforeseen refusal may be one large request, or the input that is held for many.
"""

from math import inf

from consumers.limits.base import Reservation
from consumers.limits.burst import MARGIN_MOST, PATIENCE_S

HELD_EVERY_S = 60.0
"""Held input explains refusals at most once in this time. If refusals go on, there is another cause."""


class Underway:
    """The reservations that are granted and not settled yet."""

    __slots__ = ("_calls", "_held_s")

    def __init__(self) -> None:
        self._calls: dict[int, Reservation] = {}
        self._held_s = -inf

    def begin(self, reservation: Reservation) -> None:
        self._calls[id(reservation)] = reservation

    def end(self, reservation: Reservation) -> None:
        self._calls.pop(id(reservation), None)

    def shift(self, jump_s: float) -> None:
        self._held_s += jump_s
        for each in self._calls.values():
            each.at_s += jump_s

    def needs(self, left: float) -> bool:
        """True if one of the calls may need more input than was left."""
        return left < (1 + MARGIN_MOST) * max((each.amounts.input_tokens for each in self._calls.values()), default=0.0)

    def hold(self, missing: float, now_s: float) -> bool:
        """True if the calls may hold the input that a refused call missed. They then reserve it until they end."""
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
