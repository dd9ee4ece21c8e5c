"""What workers remember about requests outside the broker: one protocol, implemented in SQLite and in Redis.

It knows who works on a request and how it ended (at most one completion is kept for each identity), what can be read of
a request afterwards, how many requests wait in the broker for a delay, how much of something was used in a period, and
which process does a job that only one may do at a time.

The store is not the system of record: losing it can cause a repeated call to a provider, but loses no request.
Every method raises `StoreUnavailable` if the store cannot answer, or cannot make a change durable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol, Self

from lanekeeper.contract.names import ATTEMPT
from lanekeeper.contract.problems import LanekeeperError

LEASE_S = 10.0
"""How long a claim is valid without renewal. Only a second message with the same identity waits until it ends: the
message that was granted the claim, redelivered, takes over at once."""


class StoreUnavailable(LanekeeperError):
    """The store is away, locked, full, read-only, corrupt or of a newer version; the text says which and what helps."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Two messages with the same identity are the same request."""

    tenant: str
    """Empty if the request has no tenant."""
    id: str
    """The `message_id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The properties of a message that the store compares."""

    body_hash: bytes
    """A hash (16 bytes) of the body as it was published: the same id with another body is a conflict."""
    mark: bytes
    """A hash (16 bytes) of what differs between two publishes of a request, such as reply address and send time."""
    redelivered: bool
    """True if the message's last delivery was never settled: the worker that had it died, or lost its channel."""
    nonce: bytes = b""
    """8 bytes unique to this delivery. If it asks again because the answer was lost, it gets the claim that it has."""
    dead_at_ms: int | None = None
    """For a dead letter that was published again: when the request had ended (ms since 1970)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How a request ended. Every reply to its requester is made from this, so that all say the same."""

    status: Literal["ok", "error"]
    code: str = ""
    """For an error: one of `PROBLEMS`."""
    body: bytes
    """The Message's or the problem document's JSON."""
    headers: Mapping[str, str | int] = field(default_factory=dict)
    """The reply's headers besides its status: lane, model, provider, attempt, wait, run time."""
    ended_ms: int
    """When it ended, by the clock of the worker that ended it; ms since 1970."""

    @property
    def is_untried(self) -> bool:
        """True if the request failed before any attempt was made."""
        return self.status == "error" and self.headers.get(ATTEMPT) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The caller may work on the request. Its token is higher than any before: earlier holders cannot complete it."""

    token: int
    deaths: int = 0
    """How many earlier holders never gave the claim back, because they died or hung."""
    followed: bool = field(default=False, repr=False)
    """Whether the store keeps the request's life (`following.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Another delivery of the same request is being worked on, and its lease is alive."""

    for_ms: int
    """How long ago its claim was granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The request has ended before."""

    completion: Completion
    same_copy: bool
    """True if, by the mark, this very message had ended: its reply may not have been sent. Also if no mark is kept."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id was used with another body."""


class Stop(StrEnum):
    """Why a holder must stop."""

    CANCELLED = "cancelled"
    FENCED = "fenced"
    """Another delivery took the claim over."""


class Cancelling(StrEnum):
    """The result of a cancellation."""

    RECORDED = "recorded"
    """The request ends as cancelled, wherever it waits."""
    UNSEEN = "unseen"
    """No worker has seen the request: it is queued, or not published yet. It ends as cancelled when it comes."""
    DISPLACED = "displaced"
    """No worker has seen the request, and the tenant was at its limit of unseen cancellations, so its oldest was
    forgotten."""
    TOLD = "told"
    """The request runs: its holder learns of the cancellation at the next renewal."""
    ENDED = "ended"
    """The request had ended before."""


@dataclass(frozen=True, slots=True)
class Held:
    """A claim that a worker holds."""

    identity: Identity
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is known about a request. Without a completion it runs, or waits for its next attempt."""

    completion: Completion | None
    running: bool
    attempts: int = 0
    due_ms: int | None = None
    """When its next attempt may begin (ms since 1970), if it waits and this is known."""


class Room(StrEnum):
    """Whether one more request may wait."""

    KEPT = "kept"
    TENANT_FULL = "tenant"
    """The tenant has reached its limit of waiting requests."""
    FULL = "all"
    """All tenants together have reached the limit of waiting requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The answer to `Allowances.take`."""

    granted: bool
    used: float
    """The amount used in this period, including what was granted now."""
    resets_in_s: float


class Allowances(Protocol):
    """How much of something may be used in a period; periods are counted from 1970 (UTC days begin at midnight)."""

    async def take(self, name: str, amount: float, *, limit: float, period_s: int) -> Taken:
        """Use `amount` if the period's sum then stays within `limit`; otherwise use nothing."""

    async def give_back(self, name: str, amount: float, *, period_s: int) -> None:
        """Subtract from what was taken in this period. A negative amount adds to it, whatever the limit."""


class Leases(Protocol):
    """Decide which process does a job that only one may do at a time (sweeping)."""

    async def hold(self, name: str, owner: str, *, for_s: float) -> int | None:
        """Take or renew a lease. Returns its fencing token, higher for each new owner; None while another holds it."""

    async def let_go(self, name: str, owner: str) -> None:
        """End a lease early. Does nothing if another owner holds it."""


class Store(Allowances, Leases, Protocol):
    """Everything over one medium, open from `__aenter__` to `__aexit__`.

    Entering never fails: if the medium cannot be used then, or breaks later, every call tries it again.
    """

    @property
    def trouble(self) -> str | None:
        """Why the last call failed; None if it succeeded."""

    async def probe(self) -> None:
        """Check that the store can be written durably. Raises StoreUnavailable."""

    async def claim(self, identity: Identity, copy: Copy) -> Granted | Running | Ended | Conflict:
        """Ask for the claim of a request, before its provider is called.

        Granted: nobody holds it, or the holder's lease has expired, or the holder has lost this very message (it was
        redelivered). Ended: the request has ended. A dead letter that is published again (`dead_at_ms` is the time of
        the stored error) is granted all the same, even with another body. Conflict: the id was used with another body.
        What `note` or `defer` stored has no effect here.
        """

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Stop]:
        """Renew leases in one step. Returns the claims whose holder must stop; the others are valid for another lease.

        A claim that the store has forgotten is not returned: nobody else holds it, and its completion will be stored.
        """

    async def release(self, held: Held, *, attempts: int = 0, due_ms: int | None = None) -> None:
        """Give up a claim without a completion: the request waits for its next attempt, which may begin at `due_ms`. If
        the claim was taken over meanwhile, its holder no longer counts as dead."""

    async def defer(self, identity: Identity, *, due_ms: int, keep_until_ms: int) -> bool:
        """Store, for status questions, that an unclaimed request waits until it is due.

        Later claims are granted all the same. Forgotten at `keep_until_ms`. Stores nothing if the identity is claimed
        or has ended. Returns whether the request may wait: False if it has ended.
        """

    async def complete(
        self, identity: Identity, copy: Copy, completion: Completion, *, token: int | None
    ) -> Completion | None:
        """Store how a request ended. The first completion stays.

        Returns the completion that is valid: the given or an earlier one. None: another delivery holds the claim (with
        `token`: it took it over). `token` None: the caller holds no claim (the deadline passed before it asked for one,
        or the message is poison); it may complete if `claim` would be granted. If `claim` would be a Conflict, the
        given completion is returned but not stored: only this message ends with it, not the request that has the id.
        """

    async def note(self, identity: Identity, completion: Completion) -> None:
        """Store how a request ended that was refused before it could be claimed, so that its result can be asked for.

        The same id with a valid body still runs. Stores nothing if the identity is claimed, deferred or has ended.
        """

    async def cancel(self, identity: Identity, completion: Completion) -> Cancelling:
        """End a request as cancelled: at once if no worker holds it, otherwise its holder learns of it at its next
        renewal."""

    async def find(self, identity: Identity) -> Found | None:
        """What is known about a request; None if no worker has seen it, or if its keeping time is over."""

    async def sweep(self) -> int:
        """Remove results whose keeping time is over and, if the store is too large, the oldest. Returns how many. Each
        call does a limited amount of work: call it again until it returns 0."""

    async def reserve(self, identity: Identity, copy: Copy, *, weight: int, until_ms: int) -> Room:
        """Count a message until `until_ms`: until then it stays in the broker, whatever happens to the request. A
        redelivered message is counted once; each other message of the same request counts separately."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
