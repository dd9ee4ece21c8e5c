"""Builds the message of a request that is published again: to a delay, to a side queue, or to the dead letters. Pure.

The message stays as it was published, but `user_id` and `expiration` move into headers (the broker closes a channel
that publishes with another user's `user_id`)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from consumers.job import Job, moment_text
from consumers.rank import rank
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from topology.codec.headers import ERRORS_KEPT, HopHeaders, carried, hop_headers
from topology.delays import Hop


def delayed(job: Job, way: Hop, past: HopHeaders, *, now_ms: int, names: Names) -> Message:
    """The message for a delay, from which it comes to its due queue. `past`: further headers for the next worker."""
    told = replace(past, hop_ms=now_ms, back_ms=now_ms + way.delay_ms)
    return _copy(job, {**_hop_headers(job, told), **way.headers}, names=names)


def set_aside(job: Job, *, now_ms: int, names: Names) -> Message:
    """The message for a side queue. Its history is unchanged; if it is fresh, it keeps the rest of its `expiration`."""
    since_ms = job.published.ms
    told = replace(
        job.hop,
        redelivered=job.redelivered,
        hop_ms=job.hop.hop_ms or since_ms,
        back_ms=job.hop.back_ms or since_ms,
        is_fresh=job.is_fresh,
    )
    copy = _copy(job, _hop_headers(job, told), names=names)
    copy.priority = rank(job.message.priority, is_fresh=job.is_fresh)
    expiration = _expiration(job)
    if job.is_fresh and expiration is not None and expiration.isdecimal():
        copy.expiration = str(max(0, int(expiration) - (now_ms - since_ms)))
    return copy


def dead_letter(job: Job, code: str, detail: str, *, ended_ms: int, names: Names) -> Message:
    """The message for `lane.dead`, with the reason."""
    headers: dict[str, Any] = {
        n.DEAD_CODE: code,
        n.DEAD_DETAIL: detail,
        n.DEAD_AT: moment_text(ended_ms),
        n.ATTEMPT: job.attempts,
        n.ROUTING_KEY: job.routing_key,
        n.ERRORS: [f"{code}: {detail}", *job.hop.errors][:ERRORS_KEPT],
    }
    if job.user_id:
        headers[n.USER_ID] = job.user_id
    if expiration := _expiration(job):
        headers[n.EXPIRATION] = expiration
    return _copy(job, headers, names=names)


def _hop_headers(job: Job, hop: HopHeaders) -> dict[str, Any]:
    """The headers for the next worker: those of `hop`, and those that are always sent."""
    told = replace(
        hop,
        first_seen_ms=job.hop.first_seen_ms or job.published.ms or job.taken_ms,
        user_id=job.user_id,
        expiration=_expiration(job),
        dead_at=job.dead_at,
    )
    headers = hop_headers(told)
    if job.identity.tenant != (job.user_id or ""):
        headers[n.TENANT] = job.identity.tenant  # a republished dead letter had it in `USER_ID`, now its sender's
    return headers


def _expiration(job: Job) -> str | None:
    return job.hop.expiration if job.trusted else job.message.expiration


def _copy(job: Job, headers: Mapping[str, Any], *, names: Names) -> Message:
    """A copy that is persistent, and without `user_id` and `expiration`."""
    return replace(
        job.message,
        exchange="",
        routing_key="",
        headers={**carried(job.message.headers, of=names), **headers},
        message_id=job.id,
        user_id=None,
        expiration=None,
        persistent=True,
    )
