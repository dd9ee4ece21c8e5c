"""Reads the account's limits from a response's headers: `anthropic-ratelimit-{requests,input-tokens,output-tokens}-*`.

Each has `limit` (per minute), `remaining` (tokens rounded to thousands) and `reset` (RFC 3339, when it is full again);
docs/facts.md, section 10. What cannot be true is ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

MOST = 1e12
FARTHEST_RESET_S = 86_400.0
"""A reset further away than this is not believed: a bucket refills within a minute."""
ROUNDED_BY: tuple[float, float, float] = (1.0, 500.0, 500.0)
"""How much less than the true value `remaining` may be, in the order of `Amounts`: requests are whole numbers."""
ROUNDED_UP_BY: tuple[float, float, float] = (0.0, 500.0, 500.0)
"""How much more than the true value `remaining` may be."""
LEAST: tuple[float, float, float] = (1.0, 1000.0, 1000.0)
"""Lower limits per minute are not believed (order as in `Amounts`): nobody sells less, and it would block all calls."""
_NAMES = ("requests", "input-tokens", "output-tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHeaders:
    """The headers about one bucket. None: missing, or impossible."""

    limit: float | None = None
    remaining: float | None = None


class RateHeaders(NamedTuple):
    """The headers of one response about all buckets, in the order of `Amounts`."""

    requests: BucketHeaders
    input_tokens: BucketHeaders
    output_tokens: BucketHeaders


def read(headers: Mapping[str, str], *, now_s: float) -> RateHeaders | None:
    """The limits in the headers; None if there are none. `headers`: by names in lower case (a dict: httpx2 searches all
    of them at each look-up); `now_s`: since 1970."""
    found = [
        _told(headers, name, least, rounded_up_by, now_s)
        for name, least, rounded_up_by in zip(_NAMES, LEAST, ROUNDED_UP_BY, strict=True)
    ]
    return RateHeaders(*found) if any(each.limit or each.remaining is not None for each in found) else None


def _told(headers: Mapping[str, str], name: str, least: float, rounded_up_by: float, now_s: float) -> BucketHeaders:
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
