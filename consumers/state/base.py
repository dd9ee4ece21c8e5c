"""The interface of the store, a database beside the broker, which is implemented with SQLite and with Redis.

The store keeps which worker has claimed a request and how the request ended (at most one result for each request), how
many requests wait in the broker for a delay, how much of an allowance (such as a tenant's dollars) was used in a
period, and leases for jobs that only one process may do at a time.

The store is not the system of record: losing it can cause a repeated call to a provider, but loses no request. Every
method raises `StoreUnavailable` if the store cannot answer, or cannot make a change durable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol, Self

from lanekeeper.contract.names import ATTEMPT
from lanekeeper.contract.problems import LanekeeperError

LEASE_S = 10.0
"""For how many seconds a claim (a worker's right to work on a request) is valid without renewal; this time is its
lease. While the claim is valid, another message of the same request must wait. But if the message for which the claim
was granted is redelivered, its new worker takes the claim over at once."""


class StoreUnavailable(LanekeeperError):
    """The store cannot be reached, or is locked, full, read-only, corrupt or of a newer version; the error's text says
    which of these, and what to do."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a request: messages with the same identity belong to the same request."""

    tenant: str
    """The request's tenant; empty if it has none."""
    id: str
    """The request's id: the AMQP property `message_id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The properties of one message that the store compares with those of other messages of the same request."""

    body_hash: bytes
    """A hash (16 bytes) of the body as it was published. It is compared because the same id with another body is a
    conflict."""
    mark: bytes
    """A hash (16 bytes) of the properties in which two publishes of the same request differ, such as reply address and
    send time. By it the store recognises a message that is redelivered."""
    redelivered: bool
    """True if an earlier delivery of the message was not settled, because its worker died or lost its channel."""
    nonce: bytes = b""
    """8 bytes that identify this delivery. If its worker asks for a claim again because the store's answer was lost,
    the store recognises the delivery, and grants the same claim. The first byte is the same for all deliveries of one
    message. It differs between a request in its lane's queue and its copy in a side queue (to which a worker moves
    requests of tenants that use more than their share). The other bytes are random."""
    dead_at_ms: int | None = None
    """If the message is a dead letter that was published again: when its request ended (ms since 1970)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How a request ended. Every reply to the requester is made from this value, so that repeated replies are equal."""

    status: Literal["ok", "error"]
    code: str = ""
    """If the request ended with an error: the error's code in docs/contract.md, such as `deadline_exceeded`."""
    body: bytes
    """The reply's body: the JSON of Anthropic's Message or, for an error, of the problem document."""
    headers: Mapping[str, str | int] = field(default_factory=dict)
    """The reply's headers except its status: lane, model, provider, attempt, wait, run time."""
    ended_ms: int
    """When the request ended, by the clock of the worker that ended it; ms since 1970."""
    mark: bytes | None = field(default=None, compare=False, repr=False)
    """The `Fingerprint.mark` of the message that ended the request; the store sets it. If the request was cancelled
    before any message of it arrived, it is the mark of the first message that arrived. None: none has arrived."""

    @property
    def is_untried(self) -> bool:
        """True if the request ended with an error before any call to a provider was attempted."""
        return self.status == "error" and self.headers.get(ATTEMPT) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The answer of `Store.claim` if the claim is granted: the caller holds it now, and may work on the request."""

    token: int
    """The claim's fencing token: higher than that of every earlier claim of the request, so that workers with an
    earlier claim can no longer complete it."""
    deaths: int = 0
    """How many workers that held the claim earlier did not release it, because they died or hung."""
    followed: bool = field(default=False, repr=False)
    """True if clients can follow the request: the store keeps the steps and events of its progress (`following.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The answer of `Store.claim` if the claim is not granted, because a worker holds it for another delivery of the
    same request, and its lease is valid."""

    for_ms: int
    """How many ms ago the other worker's claim was granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The answer of `Store.claim` if the request has already ended."""

    completion: Completion
    is_same_message: bool
    """True if this message (by its mark) is the one that ended the request, and was delivered again, so that its reply
    may not have been sent. Also true if the store does not know which message ended the request."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The answer of `Store.claim` if the request's id was used before with another body."""


ClaimAnswer = Granted | Running | Ended | Conflict


class Stop(StrEnum):
    """Why a worker that holds a claim must stop working on the request."""

    CANCELLED = "cancelled"
    FENCED = "fenced"
    """Another delivery of the request has taken over the claim, so another worker works on it."""


class Cancelling(StrEnum):
    """The result of `Store.cancel`: the state of the request when the cancellation came."""

    RECORDED = "recorded"
    """The request was waiting, and has now ended as cancelled."""
    UNSEEN = "unseen"
    """No worker has seen the request: it is queued, or not published yet. It ends as cancelled when a worker gets
    it."""
    DISPLACED = "displaced"
    """Like UNSEEN, but the tenant had reached its limit of cancellations of requests that no worker has seen, so the
    oldest of these was removed."""
    TOLD = "told"
    """The request runs. The worker that holds its claim learns of the cancellation when it next renews the claim."""
    ENDED = "ended"
    """The request had ended before the cancellation came."""


@dataclass(frozen=True, slots=True)
class Held:
    """A claim that a worker holds: the store's record that it works on the request. `token`: the fencing token, higher
    than that of every earlier claim of the request."""

    identity: Identity
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the store knows about a request: either how it ended, or whether it runs or waits."""

    completion: Completion | None
    """How the request ended. None: the request runs, or waits for its next attempt."""
    running: bool
    attempts: int = 0
    due_ms: int | None = None
    """If the request waits for its next attempt: when that may begin (ms since 1970). None: not known, or the request
    does not wait."""


class WaitingLimit(StrEnum):
    """The result of `Store.reserve`: whether one more request may wait in the broker for a delay."""

    WITHIN = "kept"
    """The request may wait: it is within the limits, and is counted."""
    TENANT = "tenant"
    """The request may not wait: its tenant has reached its limit of waiting requests."""
    TOTAL = "all"
    """The request may not wait: all tenants together have reached the limit of waiting requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The result of `Allowances.take`: whether the amount was counted as used, and how much of the allowance is used in
    this period."""

    granted: bool
    used: float
    """The amount used in this period, including the amount of this call if it was granted."""
    resets_in_s: float


class Allowances(Protocol):
    """Counts how much of something (such as a tenant's dollars) was used in a period (such as a day), and refuses more
    than a limit. Periods are counted from 1970, so that days are UTC days."""

    async def take(self, name: str, amount: float, *, limit: float, period_s: int) -> Taken:
        """Count `amount` as used of the allowance `name` if the sum that is used in this period stays within `limit`;
        otherwise count nothing."""

    async def give_back(self, name: str, amount: float, *, period_s: int) -> None:
        """Subtract an amount that was counted as used of the allowance `name`, but was not used. A negative amount is
        added, even beyond the limit."""


class Leases(Protocol):
    """Decide which process does a job that only one may do at a time, for example the removal of expired results."""

    async def hold(self, name: str, owner: str, *, for_s: float) -> bool:
        """Take a lease for `for_s` seconds, or renew it if `owner` has it already. Returns False if another owner has
        the lease."""

    async def let_go(self, name: str, owner: str) -> None:
        """Release a lease before it ends. Does nothing if another owner holds it."""


class Store(Allowances, Leases, Protocol):
    """The interface of a store for claims and results. A store is open from `__aenter__` to `__aexit__`. `__aenter__`
    never raises an error: if the SQLite file or the Redis server cannot be used, every later call tries it again."""

    @property
    def trouble(self) -> str | None:
        """Why the last call of the store failed, as text for operators; None if it succeeded."""

    async def probe(self) -> None:
        """Check that values can be written to the store and are kept. Raises StoreUnavailable."""

    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> ClaimAnswer:
        """Ask for the claim of a request, before its provider is called.

        Returns `Granted` if no worker holds the claim, if its lease has expired, or if it is held for this same message
        (with the same mark, and the same first byte of the nonce), which was redelivered. A dead letter that is
        published again (its `dead_at_ms` is the time of the stored error) also gets the claim, even if its body is
        another one. Returns `Running` if another worker holds the claim, `Ended` if the request has ended, and
        `Conflict` if the id was used with another body. A request for which only `note` or `defer` has stored something
        is granted like a new one.
        """

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Stop]:
        """Renew several claims, so that they do not expire. Returns the claims whose holder must stop, with the reason;
        the others are valid for another lease. A claim that the store has lost is not returned: no other worker holds
        it, so the outcome of its request can still be stored."""

    async def release(self, held: Held, *, attempts: int = 0, due_ms: int | None = None) -> None:
        """Give up a claim although the request has not ended, because the request waits for its next attempt, which may
        begin at `due_ms`. If another delivery has taken the claim over, the caller was counted as dead
        (`Granted.deaths`); this is corrected now."""

    async def defer(self, identity: Identity, *, due_ms: int, keep_until_ms: int) -> bool:
        """Store that an unclaimed request waits until `due_ms`, so that status questions can be answered.

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

    async def note(self, identity: Identity, completion: Completion) -> None:
        """Store how a request ended, if it was refused before it could be claimed, so that its result can be read.

        A valid message with the same id is still granted a claim. Nothing is stored if the request was claimed or
        deferred, or has ended.
        """

    async def cancel(self, identity: Identity, completion: Completion) -> Cancelling:
        """End a request as cancelled: at once if no worker holds its claim; otherwise the worker that holds the claim
        learns of the cancellation when it next renews the claim."""

    async def find(self, identity: Identity) -> Found | None:
        """Returns what the store knows about a request; None if no worker has received it, or if its result is no
        longer kept."""

    async def sweep(self) -> int:
        """Remove results whose retention time is over; if the store is too large, the oldest results as well. Returns
        the number of removed rows. Each call does a limited amount of work: call it again until it returns 0."""

    async def reserve(
        self, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> WaitingLimit:
        """Count a message that waits in the broker until `until_ms`, as `weight` requests, if the limits of waiting
        requests allow it. It counts until then even if the request ends earlier, because the broker still holds the
        message. A message that is redelivered is counted only once, but each further message of the same request is
        counted as well. `weight` is above 1 if the message has a large body."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
