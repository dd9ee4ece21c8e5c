"""The list of models for a caller that may use only some: the provider's list without the others, in pages."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from service.gateway.problems import ApiError

PAGE: Final = 20
PAGE_AT_MOST: Final = 1000
EVERY: Final = {"limit": str(PAGE_AT_MOST)}
"""The query for all models on one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """Which page is asked for."""

    limit: int
    after: str | None
    before: str | None


def paging_of(query: Mapping[str, str]) -> Paging:
    """By `limit`, `after_id`, `before_id`, as the provider reads them. Raises ApiError."""
    limit = query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= PAGE_AT_MOST):
        raise ApiError(400, f"limit: allowed is a whole number from 1 to {PAGE_AT_MOST}")
    return Paging(limit=int(limit), after=query.get("after_id"), before=query.get("before_id"))


def page_of(body: bytes, allowed: Collection[str], paging: Paging) -> bytes:
    """The provider's whole list, without other models than these, cut to a page. Raises ApiError."""
    models = [each for each in _models(body) if each["id"] in allowed]
    ids = [each["id"] for each in models]
    start = ids.index(paging.after) + 1 if paging.after in ids else 0
    end = ids.index(paging.before) if paging.before in ids else len(ids)
    page = models[start:end]
    has_more = len(page) > paging.limit
    is_backwards = paging.before is not None and paging.after is None
    page = page[-paging.limit :] if is_backwards else page[: paging.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json.dumps({"data": page, "has_more": has_more, "first_id": first, "last_id": last}).encode()


def _models(body: bytes) -> list[dict[str, Any]]:
    try:
        models = json.loads(body)["data"]
        if all(isinstance(each["id"], str) for each in models):
            return list(models)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ApiError(502, "the provider's list of models cannot be read")
