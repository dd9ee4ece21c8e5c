"""Reads an organization's rate limits from Anthropic's Admin API, so that they are known before the first call. Only a
key of the Admin API (`sk-ant-admin…`) may read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import anthropic
import structlog

from consumers.limits.base import LEAST_LIMITS, BucketHeaders, RateHeaders
from lanekeeper.telemetry import signals

WITHIN_S: Final = 5.0
TYPES: Final = ("requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")
BATCH_REQUESTS: Final = "enqueued_batch_requests"
MODELS, BATCHES = "model_group", "batch"
"""The groups of limits, as the Admin API names them."""
CACHE_AWARE: Final = "_cache_aware"
"""The end of the name of a limit that does not count what is read from the cache, as the budget does not."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class OrganizationLimits:
    """The limits of an organization."""

    models: Mapping[str, RateHeaders] = field(default_factory=dict)
    """By the name of a model, for all models that the organization may use."""
    batch_requests: int | None = None
    """How many requests may be in batches that have not ended."""


async def read_limits(client: Any, *, name: str, admin_key: str) -> OrganizationLimits:
    """`client`: the SDK's, with the provider's address. If the limits cannot be read, that is logged, and none are
    returned."""
    models: dict[str, RateHeaders] = {}
    batch_requests: int | None = None
    try:
        admin = client.with_options(api_key=admin_key, timeout=WITHIN_S, max_retries=0)
        async for entry in admin.organization.rate_limits.list():
            limits = {each.type: float(each.value) for each in entry.limits}
            if entry.group.type == BATCHES and BATCH_REQUESTS in limits:
                batch_requests = max(1, int(limits[BATCH_REQUESTS]))
            elif entry.group.type == MODELS:
                models |= dict.fromkeys(entry.models or (), _rate(limits))
    except (anthropic.AnthropicError, OSError, ValueError, TypeError, AttributeError) as error:
        log.warning(signals.LIMITS_UNREAD, provider=name, error=_brief(error))
        return OrganizationLimits()
    return OrganizationLimits(models, batch_requests)


def _rate(limits: Mapping[str, float]) -> RateHeaders:
    found = [limits.get(f"{each}{CACHE_AWARE}", limits.get(each)) for each in TYPES]
    return RateHeaders(
        *(
            BucketHeaders(limit=limit if limit is not None and limit >= least else None)
            for limit, least in zip(found, LEAST_LIMITS, strict=True)
        )
    )


def _brief(error: Exception) -> str:
    status = getattr(error, "status_code", None)
    return type(error).__name__ if status is None else f"{type(error).__name__} ({status})"
