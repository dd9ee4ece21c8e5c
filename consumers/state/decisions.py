"""What the store decides about a request: pure functions of the request's row, the time, and what is asked. Each has
the name of the method that it decides, which `requests.py` explains, and returns a `Change`: the answer, and the row as
it is to be, or `KEEP`. An engine only reads the row and writes the new one, if nothing has changed it meanwhile; else
it asks again (`requests.py`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from consumers.state import base
from consumers.state.base import (
    EVENT,
    NO_LABELS,
    RESTART,
    AppendRefusal,
    Cancelling,
    Completion,
    Ending,
    Fingerprint,
    Found,
    Granted,
    InGroup,
    Labels,
    NewEntries,
    NewEntry,
    RequestState,
    Stop,
    StoreSpec,
    Submission,
    Submitted,
)
from lanekeeper.contract.names import MODEL

T = TypeVar("T")
CANCELLED: Final = "cancelled"
as_json = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would make an encoder for each call


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The time of a decision, in ms by the clock of leases (`now`), and since 1970 (`today`)."""

    now: int
    today: int


class ProgressRow(NamedTuple):
    """How far the progress of a followed request has come."""

    body_hash: bytes
    """Of the request as its client submitted it."""
    last: int
    """Number of the last entry."""
    events: int
    """Number of events since the last restart, and the size of all entries since then, in bytes."""
    size: int


class Row(NamedTuple):
    """What is kept of a request. The names and the order are those of the SQL columns, which `sqlite/file.py` explains;
    in Redis, a row is a hash."""

    token: int
    keep_ms: int
    body_hash: bytes | None = None
    mark: bytes | None = None
    lease_ms: int = 0
    claimed_ms: int = 0
    attempts: int = 0
    noted: int = 0
    cancelling: int = 0
    nonce: bytes | None = None
    deaths: int = 0
    due_ms: int | None = None
    status: Literal["ok", "error"] | None = None
    code: str | None = None
    headers: str | None = None
    ended_ms: int | None = None
    body: bytes | None = None
    group_id: str | None = None
    seen_ms: int = 0
    lane: str = ""
    app: str = ""
    model: str = ""
    cause: str = ""
    progress: ProgressRow | None = None

    def is_over(self, at: Times) -> bool:
        """Whether the row may be removed, and counts as removed."""
        return self.keep_ms <= at.today and self.lease_ms <= at.now

    @property
    def ended(self) -> bool:
        return self.status is not None and not self.cancelling

    @property
    def state(self) -> RequestState:
        """For lists. (A worker that died is noticed only when its request is delivered again.)"""
        if not self.ended:
            return RequestState.RUNNING if self.lease_ms else RequestState.WAITING
        if self.status == "ok":
            return RequestState.COMPLETED
        return RequestState.CANCELLED if self.code == CANCELLED else RequestState.FAILED

    @property
    def step(self) -> str:
        """Where the pipeline of a request that has not ended stands. (Its column has the headers of one that has.)"""
        return self.headers or "" if self.status is None else ""

    @property
    def is_deferred(self) -> bool:
        """True if the request was deferred or submitted (`follow`), and no worker has claimed it yet."""
        return bool(self.noted) and self.status is None

    @property
    def is_unseen(self) -> bool:
        """True if the request was cancelled, and no worker has seen it."""
        return self.body_hash is None and not self.noted and self.due_ms is None and self.code == CANCELLED

    @property
    def is_waiting(self) -> bool:
        """Whether its holder has noted that the request waits: the first letter of the nonce is large then."""
        return (self.nonce or b"")[:1].isupper()

    @property
    def all_deaths(self) -> int:
        """With that of its holder, if this has not released the claim."""
        return self.deaths + (self.lease_ms > 0 and not self.is_waiting)

    def runs_again(self, message: Fingerprint) -> bool:
        """True if the message is the dead letter of the stored error, and was published again."""
        return self.ended and self.status == "error" and message.dead_at_ms == self.ended_ms

    def has_other_body(self, body_hash: bytes) -> bool:
        return self.body_hash not in (None, body_hash)

    def is_held_by(self, token: int) -> bool:
        return self.token == token and self.lease_ms > 0 and not self.ended

    def is_held_against(self, message: Fingerprint, now: int) -> bool:
        """True if a worker holds the claim for another message, and the lease is valid. A message that was redelivered
        may take over its own earlier claim."""
        is_own = self.mark == message.mark and (self.nonce or b"")[:1].lower() == message.nonce[:1]
        return self.lease_ms > now and not (message.redelivered and is_own)

    def ended_by(self, completion: Completion) -> "Row":
        return self._replace(
            status=completion.status,
            code=completion.code,
            headers=as_json(dict(completion.headers)),
            ended_ms=completion.ended_ms,
            body=completion.body,
            model=str(completion.headers.get(MODEL) or self.model),
            cause=completion.cause,
        )

    def completion(self) -> Completion:
        assert self.status is not None
        assert self.ended_ms is not None
        return Completion(
            status=self.status,
            code=self.code or "",
            body=self.body or b"",
            headers=json.loads(self.headers or "{}"),
            ended_ms=self.ended_ms,
            mark=self.mark,
        )


class Keep(Enum):
    """The row stays as it is."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP


class Change(NamedTuple, Generic[T]):
    """What was decided. `row`: the row as it is to be; None: none. `entries`: what to add to the request's progress;
    the last one has the number `row.progress.last`. `forget`: which entries to remove before. `submission`: what to
    store of a request whose progress begins."""

    answer: T
    row: Row | Literal[Keep.KEEP] | None = KEEP
    entries: Sequence[NewEntry] = ()
    forget: Literal["", "event", "all"] = ""
    submission: Submission | None = None
    group: InGroup | None = None
    """What the message says of the request's group."""
    saved_usd: float = 0.0


# ---- claims ----------------------------------------------------------------------------------------------------------


def claim(row: Row | None, at: Times, message: Fingerprint, spec: StoreSpec) -> Change[base.ClaimAnswer]:
    if row is None or row.noted or row.runs_again(message):
        return _granted(row, at, message, spec)
    if row.has_other_body(message.body_hash):
        return Change(base.Conflict())
    if row.ended:
        is_same_message = row.mark in (None, message.mark)
        return Change(base.Ended(completion=row.completion(), is_same_message=is_same_message), _marked(row, message))
    running = base.Running(for_ms=at.now - row.claimed_ms)
    if message.nonce and row.nonce == message.nonce:  # asked again, because the answer was lost
        if not row.lease_ms:  # its worker had the answer after all, and has released the claim
            return Change(running)
        return Change(Granted(token=row.token, deaths=row.deaths, followed=row.progress is not None))
    if row.is_held_against(message, at.now):
        return Change(running)
    if row.cancelling:  # the holder died before it could end the request
        ended = _ended_as_cancelled(row, at, spec)
        return Change(base.Ended(completion=row.completion(), is_same_message=True), ended)
    return _granted(row, at, message, spec, attempts=row.attempts, deaths=row.all_deaths)


def renew(row: Row | None, at: Times, token: int, owner: Ending | None, spec: StoreSpec) -> Change[Stop | None]:
    """`owner`: of an item of a fan-out: whether its pipeline has ended."""
    stop = Stop.CANCELLED if owner is not None and owner.is_over else None
    if row is None:
        return Change(stop)
    if row.token != token:
        return Change(Stop.FENCED)
    if row.cancelling or row.code == CANCELLED:
        stop = Stop.CANCELLED
    if row.ended or not row.lease_ms:
        return Change(stop)
    keep_ms = max(row.keep_ms, at.today + spec.keep_ms + spec.lease_ms)
    return Change(stop, row._replace(lease_ms=at.now + spec.lease_ms, keep_ms=keep_ms))


def shelter(row: Row | None, _: Times, token: int) -> Change[None]:
    if row is None or not row.is_held_by(token):
        return Change(None)
    return Change(None, row._replace(nonce=None))


def note_waiting(row: Row | None, _: Times, token: int, *, is_waiting: bool) -> Change[None]:
    if row is None or not row.nonce or not row.is_held_by(token):
        return Change(None)
    kind = row.nonce[:1].upper() if is_waiting else row.nonce[:1].lower()
    return Change(None, row._replace(nonce=kind + row.nonce[1:]))


def release(
    row: Row | None,
    at: Times,
    token: int,
    spec: StoreSpec,
    *,
    attempts: int,
    due_ms: int | None,
    is_survived: bool,
    step: str,
) -> Change[None]:
    if row is None or row.ended:
        return Change(None)
    if row.token != token:
        return Change(None, row._replace(deaths=max(0, row.deaths - 1)))
    if row.cancelling:
        return Change(None, _ended_as_cancelled(row, at, spec))
    released = row._replace(
        lease_ms=0,
        attempts=attempts,
        keep_ms=max(row.keep_ms, at.today + spec.keep_ms),
        due_ms=due_ms,
        deaths=0 if is_survived else row.deaths,
        headers=step or None,
    )
    return Change(None, released)


# ---- how requests end ------------------------------------------------------------------------------------------------


def complete(
    row: Row | None, at: Times, message: Fingerprint, completion: Completion, token: int | None, spec: StoreSpec
) -> Change[Completion | None]:
    keep_ms = max(message.keep_until_ms, _kept_for_group(row), at.today + spec.keep_ms)
    if row is not None and row.token == token:
        if row.ended:
            return Change(row.completion())
        ended = row._replace(lease_ms=0, cancelling=0, keep_ms=keep_ms).ended_by(completion)
        return Change(completion, ended, group=message.group, saved_usd=completion.saved_usd)
    if row is not None and not row.noted and not (token is None and row.runs_again(message)):
        if row.has_other_body(message.body_hash):
            return Change(completion if token is None else None)
        if row.ended:
            return Change(row.completion(), _marked(row, message))
        if token is not None or row.is_held_against(message, at.now):
            return Change(None)
    group, seen = message.group, {"body_hash": message.body_hash, "mark": message.mark}
    ours = _new(row, at, keep_ms, group=group, labels=message.labels, claimed_ms=at.now, **seen).ended_by(completion)
    return _again(row, Change(completion, ours, group=group, saved_usd=completion.saved_usd))


def note(
    row: Row | None,
    at: Times,
    completion: Completion,
    keep_until_ms: int,
    spec: StoreSpec,
    group: InGroup | None = None,
    labels: Labels = NO_LABELS,
) -> Change[None]:
    if row is not None and (not row.noted or (row.is_deferred and row.due_ms is not None)):
        return Change(None)
    keep_ms = max(keep_until_ms, at.today + spec.keep_ms)
    return Change(None, _new(row, at, keep_ms, group=group, labels=labels, noted=1).ended_by(completion), group=group)


def defer(
    row: Row | None,
    at: Times,
    due_ms: int,
    keep_until_ms: int,
    group: InGroup | None = None,
    labels: Labels = NO_LABELS,
) -> Change[bool]:
    if row is not None and not row.noted:
        return Change(not row.ended)
    waiting = _new(row, at, keep_until_ms, group=group, labels=labels, noted=1, due_ms=due_ms)
    return Change(True, waiting, group=group)


def cancel(row: Row | None, at: Times, completion: Completion, spec: StoreSpec) -> Change[Cancelling]:
    if row is not None and row.is_deferred:  # kept like a result, and as long as its message waits in the broker
        keep_ms = max(row.keep_ms, at.today + spec.keep_ms)
        return Change(Cancelling.RECORDED, _new(row, at, keep_ms, due_ms=row.due_ms).ended_by(completion))
    if row is None or row.noted:
        unseen = _new(row, at, at.today if row is None else row.keep_ms).ended_by(completion)
        return Change(Cancelling.UNSEEN, _ended_as_cancelled(unseen, at, spec))
    if row.ended:
        return Change(Cancelling.ENDED)
    if row.lease_ms > at.now:
        return Change(Cancelling.TOLD, KEEP if row.cancelling else row._replace(cancelling=1).ended_by(completion))
    # The token stays the same, so that a holder whose lease has expired learns that it was cancelled, not fenced.
    return Change(Cancelling.RECORDED, _ended_as_cancelled(row.ended_by(completion), at, spec))


def cancel_waiting(row: Row | None, at: Times, completion: Completion, spec: StoreSpec) -> Change[None]:
    """Of a group that was cancelled: a request that runs goes on."""
    if row is None or row.ended or row.lease_ms > at.now:
        return Change(None)
    return Change(None, cancel(row, at, completion, spec).row)


def join(row: Row | None, at: Times, group: InGroup, keep_until_ms: int, labels: Labels) -> Change[bool]:
    """A request that is about to be published belongs to a group. Returns False if it was known before, without it."""
    if row is not None:
        return Change(row.group_id == group.id)
    return Change(True, _new(None, at, keep_until_ms, group=group, labels=labels, noted=1), group=group)


def forget_unseen(row: Row | None, _: Times) -> Change[None]:
    return Change(None, None if row is not None and row.is_unseen else KEEP)


def forget(row: Row | None, _: Times) -> Change[None]:
    return Change(None, None if row is not None and row.ended and row.code != CANCELLED else KEEP)


def find(row: Row | None, at: Times) -> Change[Found | None]:
    if row is None:
        return Change(None)
    if row.ended:
        return Change(Found(completion=row.completion(), running=False, lane=row.lane, attempts=row.attempts))
    running = row.lease_ms > at.now
    due_ms = None if running else row.due_ms
    return Change(
        Found(completion=None, running=running, lane=row.lane, attempts=row.attempts, due_ms=due_ms, step=row.step)
    )


# ---- progress of requests that clients follow ------------------------------------------------------------------------


def follow(
    row: Row | None,
    at: Times,
    submission: Submission,
    first_entry: NewEntry,
    keep_until_ms: int,
    group: InGroup | None = None,
    labels: Labels = NO_LABELS,
) -> Change[Submitted]:
    if row is not None and not row.noted:
        return Change(Submitted.CONFLICT if row.has_other_body(submission.body_hash) else Submitted.KNOWN)
    before = None if row is None else row.progress
    if before is not None and row is not None and row.is_deferred:
        return Change(Submitted.KNOWN if before.body_hash == submission.body_hash else Submitted.CONFLICT)
    # The request may have ended before it was claimed. Readers have seen its end as entry `last + 1`: skip that number.
    number = 1 if before is None else before.last + 2
    waiting = _new(row, at, keep_until_ms, group=group, labels=labels, noted=1)._replace(
        progress=ProgressRow(submission.body_hash, last=number, events=0, size=len(first_entry.body))
    )
    return Change(Submitted.NEW, waiting, entries=(first_entry,), forget="all", submission=submission, group=group)


def unfollow(row: Row | None, _: Times) -> Change[None]:
    return Change(None, None if row is not None and row.is_deferred else KEEP)


def append(row: Row | None, _: Times, part: NewEntries, spec: StoreSpec) -> Change[AppendRefusal | None]:
    if row is None or not row.is_held_by(part.held.token):
        return Change(AppendRefusal.FENCED)
    entries: list[NewEntry] = []
    restarts = False
    for entry in part.entries:
        if entry.kind == RESTART:  # another call has begun, so the events of the call before are not needed
            restarts, entries = True, [each for each in entries if each.kind != EVENT]
        entries.append(entry)
    before = row.progress
    events, size = (0, 0) if before is None or restarts else (before.events, before.size)
    new_events = sum(entry.kind == EVENT for entry in entries)
    events, size = events + new_events, size + sum(len(entry.body) for entry in entries)
    if new_events and (events > spec.events_per_request or size > spec.event_bytes_per_request):
        return Change(AppendRefusal.FULL)
    after = ProgressRow(
        body_hash=part.submission.body_hash if before is None else before.body_hash,
        last=(0 if before is None else before.last) + len(entries),
        events=events,
        size=size,
    )
    return Change(
        None,
        row._replace(progress=after),
        entries=entries,
        forget="event" if before is not None and restarts else "",
        submission=part.submission if before is None else None,
    )


# ---- allowances ------------------------------------------------------------------------------------------------------


def take(used: float, freed: Sequence[float], amount: float, limit: float) -> base.AllowanceTaken:
    """`freed`: what was reserved and has ended, or gives its place to this. (In Redis, `shares.lua` decides the same in
    one step, because many processes use one counter at the same time.)"""
    left = max(0.0, used - sum(freed))
    granted = left + amount <= limit
    return base.AllowanceTaken(granted=granted, used=left + amount if granted else left)


# ---- what they share -------------------------------------------------------------------------------------------------


def _kept_for_group(row: Row | None) -> int:
    """The results of a group are kept together, until the last of them need not be kept any longer."""
    return 0 if row is None or row.group_id is None else row.keep_ms


def _new(
    row: Row | None,
    at: Times,
    keep_ms: int,
    *,
    group: InGroup | None = None,
    labels: Labels = NO_LABELS,
    **fields: Any,
) -> Row:
    """A row in place of this one, as if the request were new. `group`, `labels`: what its message says."""
    if row is not None:
        labels = Labels(*(new or old for new, old in zip(labels, (row.lane, row.app, row.model), strict=True)))
    if row is not None and row.group_id is not None:
        fields["group_id"] = row.group_id
    elif group is not None:
        fields["group_id"] = group.id
    # Without a row, the time is higher than all tokens that the request may have had in a row that was removed or lost.
    token = at.today if row is None else row.token + 1
    seen_ms = at.today if row is None or not row.seen_ms else row.seen_ms
    progress = None if row is None else row.progress
    return Row(token=token, keep_ms=keep_ms, seen_ms=seen_ms, progress=progress, **labels._asdict(), **fields)


def _granted(
    row: Row | None, at: Times, message: Fingerprint, spec: StoreSpec, *, attempts: int = 0, deaths: int = 0
) -> Change[base.ClaimAnswer]:
    held = _new(
        row,
        at,
        max(message.keep_until_ms, _kept_for_group(row), at.today + spec.keep_ms + spec.lease_ms),
        group=message.group,
        labels=message.labels,
        body_hash=message.body_hash,
        mark=message.mark,
        lease_ms=at.now + spec.lease_ms,
        claimed_ms=at.now,
        attempts=attempts,
        nonce=message.nonce,
        deaths=deaths,
        headers=None if row is None else row.step or None,
    )
    granted = Granted(token=held.token, deaths=deaths, followed=held.progress is not None)
    return _again(row, Change(granted, held, group=message.group))


def _again(before: Row | None, change: Change[T]) -> Change[T]:
    """Add an entry `restart` to the progress of a request that had ended and now runs again, because its dead letter
    was published again, or because only a refusal was stored (`note`). Clients that follow the request have seen its
    end as entry `last + 1`, so that number is left out."""
    if before is None or not before.ended or before.progress is None or not isinstance(change.row, Row):
        return change
    row = change.row._replace(progress=before.progress._replace(last=before.progress.last + 2, events=0, size=0))
    return change._replace(row=row, entries=(NewEntry(RESTART, b"{}"),), forget="event")


def _marked(row: Row, message: Fingerprint) -> Row | Literal[Keep.KEEP]:
    """If the request was cancelled before any message of it came, this is the first one."""
    return row._replace(mark=message.mark) if row.mark is None else KEEP


def _ended_as_cancelled(row: Row, at: Times, spec: StoreSpec) -> Row:
    """End a request with the completion in `row`, and keep it for as long as a message of the request can wait in the
    broker."""
    return row._replace(lease_ms=0, cancelling=0, keep_ms=max(row.keep_ms, at.today + spec.cancelled_ms))
