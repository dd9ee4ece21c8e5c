"""Converts what was learned about an account's limits to JSON text with a version number, and reads such text, checking
every value. Without I/O.

Processes of two versions of Lanekeeper share one Redis while a deployment is updated. Text that this version does not
understand raises `UnreadableError`; the process that reads it then keeps what it has learned itself.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from math import inf
from typing import Any, Final, NamedTuple

VERSION: Final = 1
"""The version of the JSON text in which processes exchange learned limits. Increase it when a field is added, is
removed, or gets another meaning."""
MOST: Final = 1e12
"""The largest number that is accepted when the JSON text of learned limits is read, which another process may have
written."""


class UnreadableError(ValueError):
    """The JSON text of learned limits cannot be used, because another version of Lanekeeper has written it, or because
    it is damaged."""


class LearnedLimits(NamedTuple):
    """What was learned about an account's limits per minute: requests, input tokens, output tokens, in this order. The
    names of the fields are part of the JSON that processes exchange."""

    told: tuple[float | None, ...] = (None, None, None)
    """The limits per minute that the provider announced; None for a limit that it did not announce."""
    told_s: tuple[float, ...] = (-inf, -inf, -inf)
    """For each limit: when the provider last announced it."""
    grown: tuple[float, ...] = (0.0, 0.0, 0.0)
    """For each guessed limit: by how much it was raised above the first guess."""
    is_silent: bool = False
    """True if the provider's answers announce no limits, so that none are assumed."""
    factors: tuple[float, ...] = (1.0, 1.0, 1.0)
    """For each limit: the factor (1 or less) by which it is multiplied, because the provider has refused calls."""
    halved_s: float = -inf
    """When a refusal (429) last lowered the limits."""
    moved_s: float = -inf
    """When the limits were last lowered, or raised by a step."""


class LearnedBursts(NamedTuple):
    """What was learned about the sizes of an account's three token buckets (`burst.py`). The names of the fields are
    part of the JSON that processes exchange."""

    proven_s: tuple[float | None, ...] = (None, None, None)
    """What the provider's bucket for each limit is proven to hold, in seconds' worth of the limit; None: nothing is
    proven."""
    cut: tuple[float, ...] = (1.0, 1.0, 1.0)
    """For each bucket: the factor (1 or less) by which its size is multiplied, because the provider has refused
    calls."""
    cut_s: float = -inf
    """When a refusal (429) last reduced the bucket sizes."""
    moved_s: float = -inf
    """When the bucket sizes were last reduced, or raised by a step."""


class Learned(NamedTuple):
    """What was learned about the limits of an account, as processes exchange it. Times are in seconds since 1970."""

    limits: LearnedLimits
    bursts: LearnedBursts
    paused_until_s: float
    held_until_s: float

    def shifted(self, jump_s: float) -> "Learned":
        """A copy in which `jump_s` is added to all times, because the clock has jumped by so many seconds."""
        limits, bursts = self.limits, self.bursts
        return Learned(
            limits._replace(
                told_s=tuple(at_s + jump_s for at_s in limits.told_s),
                halved_s=limits.halved_s + jump_s,
                moved_s=limits.moved_s + jump_s,
            ),
            bursts._replace(cut_s=bursts.cut_s + jump_s, moved_s=bursts.moved_s + jump_s),
            self.paused_until_s + jump_s,
            self.held_until_s + jump_s,
        )


@lru_cache(maxsize=64)  # the same text is sent to Redis many times a second
def to_json(learned: Learned) -> str:
    """Convert what was learned about an account's limits to JSON text, which `read` reads."""
    return json.dumps(
        {
            "version": VERSION,
            **learned._asdict(),
            "limits": learned.limits._asdict(),
            "bursts": learned.bursts._asdict(),
        }
    )


def read(text: str | bytes) -> Learned:
    """Read the JSON text that `to_json` has made of what was learned about an account's limits. Raises UnreadableError,
    and no other error, for any other text."""
    try:
        found = json.loads(text)
        if (version := found["version"]) != VERSION:
            raise UnreadableError(f"version {version!r}, this process reads {VERSION}")
        return Learned(
            _limits(found["limits"]),
            _bursts(found["bursts"]),
            _moment(found["paused_until_s"]),
            _moment(found["held_until_s"]),
        )
    except UnreadableError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


def _limits(found: Mapping[str, Any]) -> LearnedLimits:
    if not isinstance(found["is_silent"], bool):
        raise UnreadableError("is_silent is neither true nor false")
    return LearnedLimits(
        told=_three_or_none(found["told"], least=1.0),
        told_s=_three(found["told_s"], least=-inf),
        grown=_three(found["grown"], least=0.0),
        is_silent=found["is_silent"],
        factors=_three(found["factors"], least=1e-3, most=1.0),
        halved_s=_moment(found["halved_s"]),
        moved_s=_moment(found["moved_s"]),
    )


def _bursts(found: Mapping[str, Any]) -> LearnedBursts:
    return LearnedBursts(
        proven_s=_three_or_none(found["proven_s"], least=0.0),
        cut=_three(found["cut"], least=1e-3, most=1.0),
        cut_s=_moment(found["cut_s"]),
        moved_s=_moment(found["moved_s"]),
    )


def _three_or_none(values: Any, *, least: float) -> tuple[float | None, ...]:
    first, second, third = values
    return tuple(None if value is None else _number(value, least=least, most=MOST) for value in (first, second, third))


def _three(values: Any, *, least: float, most: float = MOST) -> tuple[float, ...]:
    first, second, third = values
    return tuple(_number(value, least=least, most=most) for value in (first, second, third))


def _moment(value: Any) -> float:
    """Check a time in seconds since 1970, and return it; it is minus infinity for an event that has never happened."""
    return _number(value, least=-inf, most=MOST)


def _number(value: Any, *, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise UnreadableError(f"{str(value)[:40]} where a number from {least:g} to {most:g} is expected")
    return float(value)
