"""Computes where a request waited before its call to a provider, and for how long: in a queue, in a delay, in
`lane.dead`, or in a worker.

The worker that gets the request after a wait records the wait as a trace span.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from consumers.job import Job, dead_at_ms
from lanekeeper.contract import names as n
from lanekeeper.telemetry import signals

MS: Final = 1_000_000
SHORTEST_NS: Final = 1 * MS
"""A wait outside a worker is recorded only if it is at least this many nanoseconds (1 ms) long, because its beginning
is usually known only to the millisecond."""
SHORTEST_IN_WORKER_NS: Final = 5 * MS
"""A wait inside a worker is recorded only if it is at least this many nanoseconds (5 ms) long, because every request
needs about this time to get its claim (the right to be worked on) from the store, which is not counted as waiting."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of a request: the name of the trace span that shows it, and its beginning and end in ns since 1970."""

    name: str
    start_ns: int
    end_ns: int


def before_delivery(job: Job, taken_ns: int) -> Iterator[Wait]:
    """The waits of a request outside the worker that ended when the request was delivered. They began when its
    requester published it, when a worker published it again, or when it became a dead letter. `taken_ns`: when the
    request was delivered, in ns since 1970."""
    queue, hop = job.delivery.queue, job.hop
    if hop.hop_ms is not None and hop.back_ms is not None:
        back_ns = min(hop.back_ms * MS, taken_ns)
        yield from _lasting(signals.DELAY, queue, hop.hop_ms * MS, back_ns)
        yield from _lasting(signals.WAIT, queue, back_ns, taken_ns)
    elif not job.trusted and (sent_ns := _sent_ns(job, taken_ns)) is not None:
        if (parked_ms := dead_at_ms(job.hop.dead_at)) is not None:
            yield from _lasting(signals.WAIT, signals.DEAD_LETTER, parked_ms * MS, sent_ns)
        yield from _lasting(signals.WAIT, queue, sent_ns, taken_ns)


def before_call(job: Job, taken_ns: int) -> Iterator[Wait]:
    """The wait of a request inside this worker, between its delivery and its call to a provider, if the wait is long
    enough to be recorded. `taken_ns`: when the request was delivered, in ns since 1970."""
    if job.attempted is not None and job.attempted.started_ms * MS - taken_ns >= SHORTEST_IN_WORKER_NS:
        yield Wait(f"{signals.WAIT} {signals.TURN}", taken_ns, job.attempted.started_ms * MS)


def _sent_ns(job: Job, taken_ns: int) -> int | None:
    if job.decoded is not None:
        sent_ms = job.decoded.request.published.ms
        return taken_ns if sent_ms == job.taken_ms else sent_ms * MS
    header = job.message.headers.get(n.SENT_MS)  # an expired message was not decoded, so its header is not validated
    return header * MS if isinstance(header, int) and not isinstance(header, bool) and header > 0 else None


def _lasting(operation: str, destination: str, start_ns: int, end_ns: int) -> Iterator[Wait]:
    if end_ns - start_ns >= SHORTEST_NS:
        yield Wait(f"{operation} {destination}", start_ns, end_ns)
