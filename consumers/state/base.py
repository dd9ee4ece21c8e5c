"""What the store (`store.py`) is asked, and what it answers: values, and what may go wrong."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

from consumers.clock import moment_ms, moment_text
from lanekeeper.contract.problems import LanekeeperError
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

    @staticmethod
    def place(next: str) -> tuple[int, int]:
        """The two numbers in the `next` of a page. Raises ValueError if it is none."""
        first, second = next.split(".")
        return number_of(first), number_of(second)


def number_of(text: str) -> int:
    """A number in a page's `next`. Raises ValueError if it is none that a store has told."""
    if not (text.isascii() and text.isdecimal() and (number := int(text)) <= 1 << 53):
        raise ValueError(text)
    return number


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


class StoredPauses(Protocol):
    """Keeps what operators have paused."""

    async def pauses(self) -> Sequence[Pause]: ...

    async def pause(self, pause: Pause) -> bool:
        """Store a pause, in place of the one of the same kind and name. Returns False, and changes nothing, if
        `PAUSES_AT_MOST` others are stored."""

    async def resume(self, id: str) -> Pause | None:
        """Remove a pause, and return it; None if there is none with this id."""


class Firing(NamedTuple):
    """The last time at which a schedule fired, or was seen first, and the id of the request that it published last;
    empty: none."""

    at_ms: int
    id: str


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


LEFT_MS = 3_600_000
