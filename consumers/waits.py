"""Where a request waited before its call: in a queue, in a delay, as a dead letter, or in a worker's hands.

Each wait is recorded when it is over, by the worker that has the request then.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from consumers.job import Job, dead_at_ms
from lanekeeper.contract import names as n
from lanekeeper.telemetry import signals

MS: Final = 1_000_000
SHORTEST_NS: Final = 1 * MS
"""Shorter waits are left out, because most times are known only in whole milliseconds."""
SHORTEST_TURN_NS: Final = 5 * MS
"""Shorter waits are left out: taking a free claim needs less."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait: the name of its span, and its beginning and end in ns since 1970."""

    name: str
    start_ns: int
    end_ns: int


def before(job: Job, taken_ns: int) -> Iterator[Wait]:
    """The waits between publishing, or the last worker, and this delivery."""
    queue, hop = job.delivery.queue, job.hop
    if hop.hop_ms is not None and hop.back_ms is not None:
        back_ns = min(hop.back_ms * MS, taken_ns)
        yield from _lasting(signals.DELAY, queue, hop.hop_ms * MS, back_ns)
        yield from _lasting(signals.WAIT, queue, back_ns, taken_ns)
    elif not job.trusted and (sent_ns := _sent_ns(job, taken_ns)) is not None:
        if (parked_ms := dead_at_ms(job.dead_at)) is not None:
            yield from _lasting(signals.WAIT, signals.DEAD_LETTER, parked_ms * MS, sent_ns)
        yield from _lasting(signals.WAIT, queue, sent_ns, taken_ns)


def turn(job: Job, taken_ns: int) -> Iterator[Wait]:
    """The wait between the delivery and the beginning of its call."""
    if job.attempted is not None and job.attempted.started_ms * MS - taken_ns >= SHORTEST_TURN_NS:
        yield Wait(f"{signals.WAIT} {signals.TURN}", taken_ns, job.attempted.started_ms * MS)


def _sent_ns(job: Job, taken_ns: int) -> int | None:
    if job.asked is not None:
        sent_ms = job.asked.request.sent_ms
        return taken_ns if sent_ms == job.taken_ms else sent_ms * MS
    said = job.message.headers.get(n.SENT_MS)  # an expired message was never decoded: believe its header
    return said * MS if isinstance(said, int) and not isinstance(said, bool) and said > 0 else None


def _lasting(operation: str, destination: str, start_ns: int, end_ns: int) -> Iterator[Wait]:
    if end_ns - start_ns >= SHORTEST_NS:
        yield Wait(f"{operation} {destination}", start_ns, end_ns)
