"""Reads the account's limits from a response's headers: `anthropic-ratelimit-{requests,input-tokens,output-tokens}-*`.

For each of the three limits there are three headers: `limit` (per minute), `remaining` (rounded to thousands if it
counts tokens) and `reset` (the time, as in RFC 3339, when all of the limit will be available again); see docs/facts.md,
section 10. Impossible values are ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

MOST = 1e12
"""A number in a provider's headers about limits is ignored unless it is below this, because no account has such a
limit."""
FARTHEST_RESET_S = 86_400.0
"""All headers about a limit are ignored if the header `reset` names a time that is further away than this, in seconds,
because a bucket refills within a minute."""
ROUNDED_BY: tuple[float, float, float] = (1.0, 500.0, 500.0)
"""By how much the header `remaining` may be below the true value because it is rounded: for requests (rounded to whole
numbers), input tokens and output tokens (rounded to thousands)."""
ROUNDED_UP_BY: tuple[float, float, float] = (0.0, 500.0, 500.0)
"""By how much the header `remaining` may be above the true value because it is rounded: for requests, input tokens and
output tokens."""
LEAST: tuple[float, float, float] = (1.0, 1000.0, 1000.0)
"""The lowest limits per minute (of requests, input tokens and output tokens) that are accepted from a provider's
headers. Lower ones are ignored, because no account has such limits, and they would block all calls."""
_NAMES = ("requests", "input-tokens", "output-tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHeaders:
    """What a response's headers say about one limit (requests, input or output tokens): the limit per minute, and how
    much is left of it. A value is None if its header is missing or impossible."""

    limit: float | None = None
    remaining: float | None = None


class RateHeaders(NamedTuple):
    """What the headers of one response say about an account's limits, in the order of `Amounts`."""

    requests: BucketHeaders
    input_tokens: BucketHeaders
    output_tokens: BucketHeaders


def read(headers: Mapping[str, str], *, now_s: float) -> RateHeaders | None:
    """Read the limits from a response's headers. Returns None if the headers say nothing about limits. `headers`: the
    values by name in lower case, in a dict, because a look-up in httpx2's own type searches all headers; `now_s`:
    seconds since 1970."""
    found = [
        _bucket(headers, name, least, rounded_up_by, now_s)
        for name, least, rounded_up_by in zip(_NAMES, LEAST, ROUNDED_UP_BY, strict=True)
    ]
    return RateHeaders(*found) if any(header.limit or header.remaining is not None for header in found) else None


def _bucket(headers: Mapping[str, str], name: str, least: float, rounded_up_by: float, now_s: float) -> BucketHeaders:
    prefix = f"anthropic-ratelimit-{name}-"
    reset = headers.get(f"{prefix}reset")
    if reset is not None and not _is_near(reset, now_s):
        return BucketHeaders()
    limit = _number(headers.get(f"{prefix}limit"))
    remaining = _number(headers.get(f"{prefix}remaining"))
    if limit is not None and limit < least:
        return BucketHeaders()
    if limit is not None and remaining is not None and remaining > limit:
        remaining = limit if remaining <= limit + rounded_up_by else None
    return BucketHeaders(limit=limit, remaining=remaining)


def _number(text: str | None) -> float | None:
    if text is None or len(text) > 20 or not text.isascii():
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value < MOST else None


def _is_near(text: str, now_s: float) -> bool:
    try:
        since = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return False
    return abs(since - now_s) <= FARTHEST_RESET_S
