"""The interface of the store, a database beside the broker, which is implemented with SQLite and with Redis.

The store keeps which worker has claimed a request and how the request ended (at most one result for each request), how
many requests wait in the broker for a delay, how much of an allowance (such as a tenant's dollars) was used in a
period, leases for jobs that only one process may do at a time, the progress of requests that clients follow, and what
operators have paused.

The store is not the system of record: losing it can cause a repeated call to a provider, but loses no request. Every
method raises `StoreUnavailable` if the store cannot answer, or cannot make a change durable.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

from consumers.clock import moment_ms, moment_text
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.telemetry.figures import Timings
from topology.codec.decoding import Request
from topology.lanes import GIB, MIB

LEASE_S = 10.0
DAY_S = 86_400
SEEN_LATE_S = 300
"""A cancellation of a request that no worker has seen is kept for the longest deadline and this many seconds more,
because clocks differ, and because a worker may see the request shortly after its deadline."""


class StoreUnavailable(LanekeeperError):
    """The store cannot be reached, or is locked, full, read-only, corrupt or of a newer version; the error's text says
    which of these, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """How much the store keeps and for how long."""

    keep_s: float = DAY_S
    max_bytes: int = GIB
    """Of the SQLite file, not counting free pages, or in Redis. Above it, the oldest rows of the tenants that have most
    are removed (`shedding.py`)."""
    cancelled_s: float = DAY_S + SEEN_LATE_S
    """How long the cancellation of a request that no worker has seen is kept: a little longer than the longest deadline
    of a lane."""
    unseen_per_tenant: int = 10_000
    waiting_per_tenant: int = 10_000
    waiting_in_all: int = 100_000
    files_per_tenant: int = 10_000
    groups_per_tenant: int = 1000
    events_per_request: int = 50_000
    """How many events of its answer are stored for a followed request."""
    event_bytes_per_request: int = 8 * MIB
    lease_s: float = LEASE_S
    redis_tls: Mapping[str, str] = field(default_factory=dict)
    """Arguments of redis-py for a `rediss://` URL, such as `ssl_ca_certs`."""

    @property
    def keep_ms(self) -> int:
        return round(1000 * self.keep_s)

    @property
    def cancelled_ms(self) -> int:
        return round(1000 * self.cancelled_s)

    @property
    def lease_ms(self) -> int:
        return round(1000 * self.lease_s)


DEFAULT = StoreSpec()
DISPLACED_AT_MOST = 10

# ---- claims and results ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Identity:
    """Messages with the same tenant (empty if there is none) and id (`message_id`) belong to the same request."""

    tenant: str
    id: str


class InGroup(NamedTuple):
    """What a request says of its group (`groups.py`)."""

    id: str
    size: int = 0
    """How many requests the group has; 0: this one does not say."""
    key: str = ""
    """The request's routing key."""
    webhook: str = ""
    """Where the group's end is posted; empty: this one does not say."""


class Labels(NamedTuple):
    """By what lists of requests show and choose a request; empty: not known (yet)."""

    lane: str = ""
    app: str = ""
    model: str = ""
    """Asked for; of a request that was answered, the one that did so."""


NO_LABELS = Labels()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The properties of one message that the store compares with those of other messages of the same request."""

    body_hash: bytes
    """16 bytes. The same id with another body is a conflict."""
    mark: bytes
    """A hash (16 bytes) of the properties in which two publishes of the same request differ, such as reply address and
    send time."""
    redelivered: bool
    """True if an earlier delivery of the message was not settled, because its worker died or lost its channel."""
    nonce: bytes = b""
    """8 bytes that identify this delivery. If its worker asks for a claim again because the store's answer was lost,
    the store recognises the delivery, and grants the same claim. The first byte is the same for all deliveries of one
    message. It differs between a request in its lane's queue and its copy in a side queue."""
    dead_at_ms: int | None = None
    """If the message is a dead letter that was published again: when its request ended (ms since 1970)."""
    group: InGroup | None = None
    labels: Labels = NO_LABELS
    keep_until_ms: int = 0
    """Until when at least the claim and the outcome are kept: of a pipeline, and of its steps and items, to the end of
    its deadline, because what is forgotten before is called and paid again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How a request ended."""

    status: Literal["ok", "error"]
    code: str = ""
    body: bytes
    headers: Mapping[str, str | int] = field(default_factory=dict)
    ended_ms: int
    saved_usd: float = field(default=0.0, compare=False)
    """What the request cost less because a provider's batch answered it. It is only counted, in its group."""
    mark: bytes | None = field(default=None, compare=False)
    """The `Fingerprint.mark` of the message that ended the request; the store sets it. If the request was cancelled
    before any message of it arrived, it is the mark of the first message that arrived. None: none has arrived."""
    cause: str = field(default="", compare=False)
    """Of an error: the same for errors that differ only in numbers and names (`cause_of`). It is stored, but not
    returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The caller holds the request's claim now, and may work on the request."""

    token: int
    """The fencing token: higher than that of every earlier claim of the request."""
    deaths: int = 0
    """How many workers that held the claim earlier did not release it, because they died or hung while the request did
    not wait."""
    followed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A worker holds the claim for another delivery of the same request, and its lease is valid."""

    for_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The request has already ended."""

    completion: Completion
    is_same_message: bool
    """True if this message ended the request and was delivered again, so that its reply may not have been sent; or if
    the store does not know which message did."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The request's id was used before with another body."""


ClaimAnswer = Granted | Running | Ended | Conflict


class Stop(StrEnum):
    """Why a worker that holds a claim must stop working on the request."""

    CANCELLED = "cancelled"
    FENCED = "fenced"


class Cancelling(StrEnum):
    """The state of the request when its cancellation came."""

    RECORDED = "recorded"
    UNSEEN = "unseen"
    """No worker has seen the request."""
    DISPLACED = "displaced"
    """Like UNSEEN, but the tenant had reached its limit of these, so the oldest was removed."""
    TOLD = "told"
    """The request runs."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Held:
    """A claim that a worker holds, with its fencing token."""

    identity: Identity
    token: int
    item_of: str = ""
    """Of an item of a fan-out: the id of its pipeline's request. Its worker must stop when that has ended."""


class Ending(NamedTuple):
    """Whether and how a request has ended, without its outcome's bytes."""

    status: Literal["ok", "error"] | None = None
    """None: it has not ended."""
    code: str = ""
    ended_ms: int = 0
    size: int = 0
    """Of its outcome's body, in bytes."""
    is_cancelled: bool = False
    """Its worker has still to end it."""
    is_running: bool = False
    """It has not ended, and a worker holds its claim."""

    @property
    def is_over(self) -> bool:
        return self.status is not None or self.is_cancelled


IN_BATCH = "waiting for a batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the store knows about a request: either how it ended, or whether it runs or waits for its next attempt."""

    completion: Completion | None
    running: bool
    lane: str = ""
    attempts: int = 0
    due_ms: int | None = None
    step: str = ""
    """Where its pipeline stands, such as `summarise, 37 of 100`; `IN_BATCH` at its end if it waits for a batch, or did
    before it ran."""

    @property
    def is_in_batch(self) -> bool:
        return not self.running and self.step.endswith(IN_BATCH)

    @property
    def stands(self) -> str:
        return self.step.removesuffix(IN_BATCH).removesuffix(", ") if self.running else self.step


class RequestState(StrEnum):
    """What lists tell of a request: a word for all that wait (queued, delayed, retrying)."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Which requests are meant: those that have one of the values of each field that is not empty. Times are those at
    which the store heard of a request first (ms since 1970)."""

    states: frozenset[RequestState] = frozenset()
    tenants: frozenset[str] = frozenset()
    lanes: frozenset[str] = frozenset()
    apps: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    codes: frozenset[str] = frozenset()
    causes: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    since_ms: int = 0
    until_ms: int = 1 << 53


class ListedRequest(NamedTuple):
    """A request in a list."""

    identity: Identity
    seen_ms: int
    labels: Labels
    state: RequestState
    code: str
    cause: str
    group_id: str


LISTED_WITHIN_S = 0.7
"""A page of a list of requests ends after so long, with fewer requests, and names where the next one goes on."""


class RequestPage(NamedTuple):
    """Some requests, the newest first. `next`: where the next page begins; None: there is none. A page may have few
    requests, or none, because it looks at a limited number of them."""

    requests: Sequence[ListedRequest]
    next: str | None

    @property
    def back_to_ms(self) -> int | None:
        """How far back the page has looked; None: there are no older ones."""
        return None if self.next is None else int(self.next.partition(".")[0])


class WaitingLimit(StrEnum):
    """Whether one more request may wait in the broker for a delay."""

    WITHIN = "kept"
    TENANT = "tenant"
    TOTAL = "all"


UNIT_BYTES = 16 * 1024
WHICH_LIMIT = {
    WaitingLimit.TENANT: "its tenant has as many requests waiting as one may (each 16 KiB of a body count as one)",
    WaitingLimit.TOTAL: "as many requests wait as may in all",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowanceTaken:
    """Whether an amount was counted as used of an allowance, and how much of it is used in this period now."""

    granted: bool
    used: float


class Period(NamedTuple):
    """A span of calendar time (UTC) in which an allowance counts. `length_s` tells kinds of periods apart."""

    length_s: int
    number: int
    ends_ms: int


class AllowanceReservation(NamedTuple):
    """Of an amount that counts as used before it is: until when at most (ms since 1970). It is given back then, because
    its process has died. A later reservation with the same id takes its place before; `nonce` tells both apart."""

    id: str
    nonce: str
    until_ms: int


def period_of(length_s: int, now_ms: int) -> Period:
    """The current one of the periods of this length, counted from 1970."""
    number = now_ms // (1000 * length_s)
    return Period(length_s, number, (number + 1) * 1000 * length_s)


# ---- progress of requests that clients follow ------------------------------------------------------------------------

QUEUED = "queued"
EVENT = "event"
"""The kind of an entry that is an event of the provider's stream."""
RESTART = "restart"
"""The kind of the entry that is added when another call to a provider begins. The store then removes the events of the
call before, and readers must discard them."""
ENTRIES_AT_ONCE = 200


class NewEntry(NamedTuple):
    """One step of the request, or one event of the answer's stream, as JSON text."""

    kind: str
    body: bytes


class Entry(NamedTuple):
    """An entry in the progress of a request, with its number (from 1)."""

    number: int
    kind: str
    body: bytes


class Submission(NamedTuple):
    """What is stored of a followed request as its client submitted it. The fields have the names of the SQL columns;
    times are ms since 1970."""

    body_hash: bytes
    lane: str
    submitted_ms: int
    due_ms: int | None
    deadline_ms: int

    @classmethod
    def of(cls, request: Request, body_hash: bytes) -> Self:
        return cls(
            body_hash=body_hash,
            lane=request.lane,
            submitted_ms=request.published.ms,
            due_ms=request.due_ms,
            deadline_ms=request.deadline_ms,
        )


class Submitted(StrEnum):
    """Whether the request was submitted before."""

    NEW = "new"
    KNOWN = "known"
    """The same request was submitted before, or a worker has received it."""
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class NewEntries:
    """New entries of one request, in order, from the worker that holds its claim."""

    held: Held
    submission: Submission
    entries: Sequence[NewEntry]


class AppendRefusal(StrEnum):
    """Why the store did not append entries."""

    FENCED = "fenced"
    """The worker's claim was taken over or is lost, or the request has ended."""
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The entries of a followed request after the last one that a client has read."""

    entries: Sequence[Entry] = ()
    last: int = 0
    """The number of the last entry that is stored."""
    ended: bool = False
    is_known: bool = True
    """False if the store does not know the request, or has already removed it."""


# ---- the brake -------------------------------------------------------------------------------------------------------

PauseKind = Literal["lane", "tenant", "app", "model", "provider", "schedule"]
PAUSE_KINDS: tuple[PauseKind, ...] = get_args(PauseKind)
PAUSES_AT_MOST = 200
WEBHOOKS_KEPT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """An operator's order that no request of a lane, tenant or application starts, no call of a model or provider, or
    that a schedule publishes nothing.
    There is at most one for each kind and name: a new one replaces it."""

    kind: PauseKind
    name: str
    since_ms: int
    until_ms: int | None
    who: str
    why: str

    @property
    def id(self) -> str:
        return pause_id(self.kind, self.name)

    @property
    def description(self) -> str:
        until = "" if self.until_ms is None else f" until {moment_text(self.until_ms)}"
        why = f": {self.why}" if self.why else ""
        return f"{self.kind} {self.name[:80]} was paused by an operator at {moment_text(self.since_ms)}{until}{why}"

    def has_ended(self, now_ms: int) -> bool:
        return self.until_ms is not None and self.until_ms <= now_ms

    def as_json(self) -> dict[str, str | None]:
        return {
            "id": self.id,
            "kind": self.kind,
            "name": self.name,
            "since": moment_text(self.since_ms),
            "until": None if self.until_ms is None else moment_text(self.until_ms),
            "who": self.who,
            "why": self.why,
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(
            kind=found["kind"],
            name=found["name"],
            since_ms=moment_ms(found["since"]) or 0,
            until_ms=moment_ms(found["until"]),
            who=found["who"],
            why=found["why"],
        )


def pause_id(kind: PauseKind, name: str) -> str:
    """The id of every pause of this kind and name."""
    return blake2b(f"{kind} {name}".encode(errors="surrogateescape"), digest_size=6).hexdigest()


def pauses_in(rows: Iterable[bytes | str]) -> list[Pause]:
    """The stored pauses, the oldest first."""
    found: list[Pause] = []
    for row in rows:
        with suppress(KeyError, TypeError, ValueError):  # another version has written it in another form
            found.append(Pause.of_json(json.loads(row)))
    return sorted(found, key=lambda pause: (pause.since_ms, pause.id))


# ---- the store -------------------------------------------------------------------------------------------------------


class Allowances(Protocol):
    """Counts how much of something (such as a tenant's dollars) was used in a period (such as a day), and refuses more
    than a limit."""

    async def take(
        self, name: str, amount: float, *, limit: float, period: Period, reservation: AllowanceReservation | None = None
    ) -> AllowanceTaken:
        """Count `amount` as used if the sum in this period stays within `limit`; otherwise count nothing. With a
        reservation it counts until that is settled or ends."""

    async def settle(self, name: str, used: float, *, period: Period, reservation: AllowanceReservation) -> None:
        """Count `used` instead of what was reserved."""

    async def give_back(self, name: str, amount: float, *, period: Period) -> None:
        """Subtract an amount that was not used. A negative amount is added, even beyond the limit."""


class Leases(Protocol):
    """Decide which process does a job that only one may do at a time, for example the removal of expired results."""

    async def hold(self, name: str, owner: str, *, for_s: float) -> bool:
        """Take a lease, or renew it if `owner` has it already. Returns False if another owner has the lease."""

    async def let_go(self, name: str, owner: str) -> None: ...


class StoredPauses(Protocol):
    """Keeps what operators have paused."""

    async def pauses(self) -> Sequence[Pause]: ...

    async def pause(self, pause: Pause) -> bool:
        """Store a pause, in place of the one of the same kind and name. Returns False, and changes nothing, if
        `PAUSES_AT_MOST` others are stored."""

    async def resume(self, id: str) -> Pause | None:
        """Remove a pause, and return it; None if there is none with this id."""


class StoredHistory(Protocol):
    """Keeps what each worker notes once a minute, for an hour."""

    async def note_history(self, minute: int, worker: str, row: str) -> None:
        """`minute`: since 1970."""

    async def history(self, now_minute: int) -> Mapping[int, Mapping[str, str]]:
        """The notes of the hour before a minute, by minute and worker."""


class Firing(NamedTuple):
    """The last time at which a schedule fired, or was seen first, and the id of the request that it published last;
    empty: none."""

    at_ms: int
    id: str


class StoredFirings(Protocol):
    """Keeps when each schedule fired last."""

    async def firings(self) -> Mapping[str, Firing]: ...

    async def fired(self, schedule: str, firing: Firing, *, instead_of_ms: int = 0) -> None:
        """Changes nothing if a later firing is stored, other than that of `instead_of_ms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that lies at a provider (Anthropic's Files API), and whose it is."""

    id: str
    """The provider's."""
    tenant: str
    provider: str
    created_ms: int
    size: int = 0
    """In bytes; 0 if a tool of the provider made the file."""
    until_ms: int | None = None
    """When it expires at the provider. None: it is kept until it is deleted."""


class StoredFiles(Protocol):
    """Keeps whose the files at the providers are. A file that expires is forgotten then."""

    async def keep_file(self, file: StoredFile) -> bool:
        """Returns False, and changes nothing, if the file is another tenant's, or its tenant has `files_per_tenant`."""

    async def find_files(self, ids: Sequence[str]) -> Mapping[str, StoredFile]:
        """Those that are known, by their ids, of all tenants."""

    async def files(self, tenant: str) -> Sequence[StoredFile]:
        """All of a tenant's, the newest first."""

    async def forget_file(self, file: StoredFile) -> None: ...


LEFT_MS = 3_600_000


class Batching(Protocol):
    """Keeps which ticket each request belongs to that is in a provider's batch, and how much of each account's batch
    queue is reserved. A ticket's id may begin with that of another one: then it is a part of that ticket, which was
    split, and may take its requests. What is kept is removed at `until_ms`, if it was not cleared before."""

    async def gather(
        self, ticket: str, requests: Sequence[Identity], *, until_ms: int, former: Mapping[Identity, str] | None = None
    ) -> Collection[Identity]:
        """Mark requests as belonging to this ticket. Returns those that now do: not those of another ticket that was
        submitted. `former`: for requests that came back from a ticket to be gathered again, which one that was."""

    async def submit(self, ticket: str, requests: Sequence[Identity], *, until_ms: int) -> Mapping[Identity, bool]:
        """Mark requests as submitted. Returns those that belong to this ticket (or to the one of which it is a part),
        or to none, because the store was lost; and for each whether a batch with it may exist: it was submitted before,
        in this same ticket, or it is not known."""

    async def clear(self, ticket: str, requests: Sequence[Identity]) -> None:
        """Requests have left this ticket. Their marks are kept for `LEFT_MS`: until their outcomes are stored, a
        repeated message must not be put into another ticket."""

    async def enqueue(
        self,
        ticket: str,
        account: str,
        *,
        requests: int,
        tokens: int,
        most_requests: int,
        most_tokens: int | None,
        until_ms: int,
    ) -> bool:
        """Reserve room in the account's batch queue. Returns False if there is not enough; a ticket that is alone gets
        room whatever its size. What this ticket has reserved before is replaced."""

    async def dequeue(self, ticket: str, account: str) -> None: ...


class Store(Allowances, Leases, StoredPauses, StoredFirings, StoredFiles, StoredHistory, Batching, Protocol):
    """Claims and results. A store is open from `__aenter__` to `__aexit__`. `__aenter__` never raises an error: if the
    SQLite file or the Redis server cannot be used, every later call tries it again."""

    @property
    def trouble(self) -> str | None: ...

    @property
    def times(self) -> Timings: ...

    @property
    def is_full(self) -> bool: ...

    async def probe(self) -> None: ...

    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> ClaimAnswer:
        """Ask for the claim of a request.

        It is granted if no worker holds it, if its lease has expired, or if it is held for this same message (with the
        same mark, and the same first byte of the nonce), which was redelivered. A dead letter that is published again
        (its `dead_at_ms` is the time of the stored error) also gets the claim, even if its body is another one. A
        request for which only `note` or `defer` has stored something is granted like a new one.
        """

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Stop]:
        """Renew several claims, so that they do not expire. Returns the claims whose holder must stop, with the reason;
        the others are valid for another lease. A claim that the store has lost is not returned: no other worker holds
        it, so the outcome of its request can still be stored. An item whose pipeline has ended is cancelled."""

    async def shelter(self, held: Held) -> None:
        """Let no redelivery of the message take the claim over while its lease is valid, because the request has an
        answer that was paid for, and storing it may take longer than the delivery lasts."""

    async def note_waiting(self, held: Held, *, is_waiting: bool) -> None:
        """Note that the request of a claim waits, so that it is not at fault if its worker dies (`Granted.deaths`); or
        that it waits no longer, which is how each claim begins."""

    async def release(
        self, held: Held, *, attempts: int = 0, due_ms: int | None = None, is_survived: bool = True, step: str = ""
    ) -> None:
        """Give up a claim although the request has not ended, because the request waits for its next attempt, which may
        begin at `due_ms`. `is_survived`: whether the worker has worked on the request and lives, so that earlier deaths
        (`Granted.deaths`) were not the request's fault and are forgotten. If another delivery has taken the claim over,
        the caller was counted as dead; this is corrected now."""

    async def defer(
        self,
        identity: Identity,
        *,
        due_ms: int,
        keep_until_ms: int,
        group: InGroup | None = None,
        labels: Labels = NO_LABELS,
    ) -> bool:
        """Store that an unclaimed request waits until `due_ms`.

        What is stored does not prevent a claim, and is removed at `keep_until_ms`. Nothing is stored if the request was
        claimed or has ended. Returns False if the request has ended, so that it need not wait.
        """

    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        """Store how a request ended, unless a completion is stored already.

        Returns the valid completion, which is the given one or the one that was stored first; or None if another
        delivery holds the claim. `token` is None if the caller holds no claim, because the deadline passed before it
        asked for one, or because the message cannot be decoded. Then the completion is stored if `claim` would grant a
        claim. If `claim` would return a Conflict, the given completion is returned but not stored, because it concerns
        only this message, not the request that owns the id.
        """

    async def note(
        self,
        identity: Identity,
        completion: Completion,
        *,
        keep_until_ms: int = 0,
        group: InGroup | None = None,
        labels: Labels = NO_LABELS,
    ) -> None:
        """Store how a request ended, if it was refused before it could be claimed, so that its result can be read; in
        place of what was noted before.

        A valid message with the same id is still granted a claim. Nothing is stored if the request was claimed or
        deferred, or has ended.
        """

    async def cancel(self, identity: Identity, completion: Completion) -> Cancelling:
        """End a request as cancelled: at once, or through the worker that holds its claim, at the next renewal."""

    async def find(self, identity: Identity) -> Found | None:
        """Returns None if no worker has received the request, or if its result is no longer kept."""

    async def tenants_of(self, id: str) -> Sequence[str]:
        """The tenants of which a request with this id is known, in the order of their names."""

    async def endings(self, requests: Sequence[Identity]) -> Sequence[Ending | None]:
        """Like `find`, for several requests, without the bytes of their outcomes."""

    async def listed(self, wanted: RequestFilter, *, most: int, after: str | None = None) -> RequestPage:
        """A page of the requests of all tenants, without the steps and items of pipelines. `after`: `next` of the page
        before. Raises ValueError if that is none."""

    async def reserve(
        self, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> WaitingLimit:
        """Count a message that waits in the broker until `until_ms`, as `weight` requests, if the limits of waiting
        requests allow it. It counts until then even if the request ends earlier, because the broker still holds the
        message. A message that is redelivered was counted before; each further message of the same request counts as
        well."""

    async def debounce(self, identity: Identity, key: str, *, published_ms: int, until_ms: int) -> bool:
        """Record that a request updates its tenant's `key`. Returns whether no later update is recorded; of two that
        were published in the same ms, that with the greater id is the later one. Kept until the greatest `until_ms`."""

    async def note_webhook(self, identity: Identity, row: bytes, *, until_ms: int) -> None:
        """Keep the log of a request's webhook, in place of an earlier one. Of more than `WEBHOOKS_KEPT`, and an
        eighth, the first to end of the tenants that have most are removed."""

    async def webhook(self, identity: Identity) -> bytes | None: ...

    async def webhooks(self, *, most: int) -> Sequence[tuple[Identity, bytes]]: ...

    async def sweep(self) -> int:
        """Remove what need no longer be kept and, if the store is too large, the oldest rows of the tenants that have
        most. It does a limited amount of work: call it again until it returns 0."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class Following(Protocol):
    """Keeps the progress of requests, so that clients can follow them: how each was submitted, and numbered entries for
    its steps and the events of its answer. They are kept as long as the request's result.

    Clients can follow requests that the gateway submitted (`follow`), and streamed requests without `reply_to`.
    """

    async def follow(
        self,
        identity: Identity,
        submission: Submission,
        *,
        first_entry: NewEntry,
        keep_until_ms: int,
        group: InGroup | None = None,
        labels: Labels = NO_LABELS,
    ) -> Submitted:
        """Store the submission of a request that is about to be published, and its first entry. Both are removed at
        `keep_until_ms` unless a worker sees the request before. Changes nothing if a worker has seen the request, or if
        it has ended."""

    async def unfollow(self, identity: Identity) -> None:
        """Remove the submission of a request that could not be published, unless a worker has seen it."""

    async def forget(self, identity: Identity) -> None:
        """Remove all that is kept of a request that has ended. A cancelled one stays: its message may not have arrived
        yet."""

    async def submission(self, identity: Identity) -> Submission | None: ...

    async def append(self, parts: Sequence[NewEntries]) -> Sequence[AppendRefusal | None]:
        """Append entries to several requests; those of one part together or not at all. Returns for each part why its
        entries were refused, or None if they were appended. A power cut may lose entries that were appended last."""

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[Look | None]:
        """Returns the new entries of several requests, each of which is given with the number of the last entry that
        was read. The result for a request is None if the store knows the request, it has not ended, and it has no new
        entries."""


class FollowedStore(Store, Following, Protocol):
    """The whole store."""
