"""Reads single values of a provider's answer, which may be anything."""

import math
from collections.abc import Mapping
from typing import Any, Final

from consumers.failures import TransientError
from consumers.limits.base import LEAST_LIMITS, ROUNDED_UP_BY, BucketHeaders
from lanekeeper.contract.identity import encodable

MOST_TOKENS: Final = 10_000_000
"""More is ignored as impossible: charging it would use up the budget for ever."""
MALFORMED: Final = (KeyError, TypeError, AttributeError, ValueError)
_NAME_CHARACTERS: Final = 256
"""Longer names in an answer are not copied into headers and spans."""
_MOST_LIMIT: Final = 1e12


def name_in(value: object) -> str:
    """A name, such as a model's; empty if it is none."""
    return encodable(value) if isinstance(value, str) and len(value) <= _NAME_CHARACTERS else ""


def text_in(value: object) -> str:
    """A text, or a number as text; empty if it is neither."""
    return value if isinstance(value, str) else str(value) if type(value) is int else ""


def object_in(value: object) -> Mapping[str, Any]:
    """A JSON object; empty if it is none."""
    return value if isinstance(value, dict) else {}


def count_in(given: object, name: str) -> int:
    """A number of tokens; one that is missing or impossible is 0."""
    value = given.get(name) if isinstance(given, dict) else None
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else 0


def limit_in(text: str | None) -> float | None:
    """The number in a header about limits."""
    if text is None or len(text) > 20 or not text.isascii():
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value < _MOST_LIMIT else None


def bucket_headers(limit_text: str | None, remaining_text: str | None, index: int) -> BucketHeaders:
    """What headers say about one limit (`index`: as in `Amounts`). Impossible values are ignored."""
    limit, remaining = limit_in(limit_text), limit_in(remaining_text)
    if limit is not None and limit < LEAST_LIMITS[index]:
        return BucketHeaders()
    if limit is not None and remaining is not None and remaining > limit:
        remaining = limit if remaining <= limit + ROUNDED_UP_BY[index] else None
    return BucketHeaders(limit=limit, remaining=remaining)


def broken_stream(where: str, error: Exception) -> TransientError:
    """The exception for events that make no answer."""
    return TransientError(f"the stream is broken {where} ({error.__class__.__name__})", type="broken_stream")
