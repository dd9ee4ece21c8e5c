"""Builds the message with which a worker publishes a request again: to the delay exchanges, to a side queue (for
requests of tenants that use more than their share of a lane), or to `lane.dead`. Does no I/O.

Body and properties stay as the requester published them, except that `user_id` and `expiration` move into headers,
because the broker closes a channel that publishes with another user's `user_id`, and would apply `expiration` again in
each queue."""

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


def delayed(job: Job, first_hop: Hop, past: HopHeaders, *, now_ms: int, names: Names) -> Message:
    """The copy of a request that is published to the delay exchanges, which bring it to its lane's due queue.
    `first_hop`: the first of these exchanges, and the headers that choose the length of the delay. `past`: what the
    worker that gets the request next must know (attempts, errors, due time)."""
    hop = replace(past, hop_ms=now_ms, back_ms=now_ms + first_hop.delay_ms)
    return _copy(job, {**_hop_headers(job, hop), **first_hop.headers}, names=names)


def set_aside(job: Job, *, now_ms: int, names: Names) -> Message:
    """The copy of a request that is published to a side queue (a queue for requests of tenants that use more than their
    share of a lane). Attempts, errors and due time are unchanged. If the request is fresh (was never delayed or
    retried) and has an `expiration`, the copy's `expiration` is shorter by the time since the request was published."""
    since_ms = job.published.ms
    hop = replace(
        job.hop,
        redelivered=job.redelivered,
        hop_ms=job.hop.hop_ms or since_ms,
        back_ms=job.hop.back_ms or since_ms,
    )
    copy = _copy(job, _hop_headers(job, hop), names=names)
    copy.priority = rank(job.message.priority, is_fresh=hop.is_fresh)
    expiration = hop.expiration
    if hop.is_fresh and expiration is not None and expiration.isdecimal():
        copy.expiration = str(max(0, int(expiration) - (now_ms - since_ms)))
    return copy


def dead_letter(job: Job, code: str, detail: str, *, ended_ms: int, names: Names) -> Message:
    """The copy of a failed request that is published to `lane.dead`. Its headers give the error's code and detail, and
    the time when the request ended."""
    headers: dict[str, Any] = {
        n.DEAD_CODE: code,
        n.DEAD_DETAIL: detail,
        n.DEAD_AT: moment_text(ended_ms),
        n.ATTEMPT: job.attempts,
        n.ROUTING_KEY: job.routing_key,
        n.ERRORS: [f"{code}: {detail}", *job.hop.errors][:ERRORS_KEPT],
    }
    if job.hop.user_id:
        headers[n.USER_ID] = job.hop.user_id
    if job.hop.expiration:
        headers[n.EXPIRATION] = job.hop.expiration
    return _copy(job, headers, names=names)


def _hop_headers(job: Job, hop: HopHeaders) -> dict[str, Any]:
    """The headers with which a worker publishes a request again, for the worker that gets the request next. They give
    the fields of `hop` (attempts, errors, due time, …), the time when a worker first received the request, and the
    request's user and tenant."""
    hop = replace(
        hop,
        first_seen_ms=job.hop.first_seen_ms or job.published.ms or job.taken_ms,
        user_id=job.hop.user_id,
        expiration=job.hop.expiration,
        dead_at=job.hop.dead_at,
    )
    headers = hop_headers(hop)
    if job.identity.tenant != (job.hop.user_id or ""):
        # the tenant of a republished dead letter: the header USER_ID now names who republished it
        headers[n.TENANT] = job.identity.tenant
    return headers


def _copy(job: Job, headers: Mapping[str, Any], *, names: Names) -> Message:
    """A persistent copy of the job's message, without the properties `user_id` and `expiration`. Its headers are those
    that the requester set, and `headers`."""
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
