"""What a request takes along when a worker sends it on: into a delay, aside, or among the dead letters."""

from collections.abc import Mapping
from typing import Any

from consumers.job import Job
from topology import names as n
from topology.contract.headers import HopHeaders, carried, hop_headers
from topology.contract.messages import Message
from topology.names import Names


def hop_of(
    job: Job,
    *,
    attempts: int,
    due_ms: int | None,
    errors: tuple[str, ...],
    redelivered: bool,
    hop_ms: int | None,
    back_ms: int | None,
    is_fresh: bool = False,
) -> HopHeaders:
    """What the next worker is told."""
    return HopHeaders(
        attempts=attempts,
        errors=errors,
        first_seen_ms=job.hop.first_seen_ms or job.published.ms or job.taken_ms,
        due_ms=due_ms,
        user_id=job.user_id,
        expiration=job.hop.expiration if job.trusted else job.message.expiration,
        dead_at=job.dead_at,
        redelivered=redelivered,
        hop_ms=hop_ms,
        back_ms=back_ms,
        is_fresh=is_fresh,
    )


def sent_on(job: Job, hop: HopHeaders, *, more: Mapping[str, Any] | None = None, of: Names) -> Message:
    """The message for the next worker, who believes its headers."""
    headers = {**hop_headers(hop), **(more or {})}
    if job.identity.tenant != (job.user_id or ""):
        headers[n.TENANT] = job.identity.tenant  # of a dead letter it stood in a header that tells the sender now
    return copied(job, headers, of=of)


def copied(job: Job, headers: dict[str, Any], *, of: Names) -> Message:
    """The message as it was published, without `user_id` (a foreign one closes the channel) and `expiration`."""
    original = job.message
    return Message(
        body=original.body,
        headers={**carried(original.headers, of=of), **headers},
        content_type=original.content_type,
        content_encoding=original.content_encoding,
        message_id=job.id,
        correlation_id=original.correlation_id,
        reply_to=original.reply_to,
        priority=original.priority,
        type=original.type,
        timestamp_s=original.timestamp_s,
        app_id=original.app_id,
    )
