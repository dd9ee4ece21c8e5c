"""Makes the list of models for a caller that may not use all of them: the provider's list without the forbidden models,
in pages."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from service.gateway.problems import ApiError

PAGE: Final = 20
"""How many models a page of `GET /v1/models` has if the call has no parameter `limit`."""
PAGE_AT_MOST: Final = 1000
"""The most models of one page of `GET /v1/models`."""
EVERY: Final = {"limit": str(PAGE_AT_MOST)}
"""Query parameters that make the provider return all its models on one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """Which page of the list of models a caller asks for: at most `limit` models, those after or before the model with
    a given id."""

    limit: int
    after: str | None
    before: str | None


def paging_of(query: Mapping[str, str]) -> Paging:
    """Read the query parameters `limit`, `after_id` and `before_id` of `GET /v1/models` as Anthropic does. Raises
    ApiError."""
    limit = query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= PAGE_AT_MOST):
        raise ApiError(400, f"limit: allowed is a whole number from 1 to {PAGE_AT_MOST}")
    return Paging(limit=int(limit), after=query.get("after_id"), before=query.get("before_id"))


def page_of(body: bytes, allowed: Collection[str], paging: Paging) -> bytes:
    """The JSON of one page of the list of models. `body`: the provider's whole list, of which only models in `allowed`
    are shown. Raises ApiError if the provider's list cannot be read."""
    models = [model for model in _models(body) if model["id"] in allowed]
    ids = [model["id"] for model in models]
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
        if all(isinstance(model["id"], str) for model in models):
            return list(models)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ApiError(502, "the provider's list of models cannot be read")
