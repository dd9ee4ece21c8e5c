"""What is remembered of requests beside the broker: five small protocols, kept by SQLite or by Redis.

    Claims          who works on a request, and how it ended: at most one completion is ever kept of an identity
    Results         what can be read of a request afterwards
    Waits           how much waits in the broker because its publisher asked for it
    Allowances      how much of something was used in a period
    Leases          who does what only one process should do

The store is no system of record: losing it can cost a repeated call, never a request.
Every method raises `StoreUnavailable` where the store cannot answer, or cannot make it durable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol, Self

from lanekeeper.contract.names import ATTEMPT
from lanekeeper.contract.problems import LanekeeperError

LEASE_S = 10.0
"""How long a claim holds that is not renewed. Only a second message of the same identity waits for that: the request
itself, redelivered, takes over at once."""


class StoreUnavailable(LanekeeperError):
    """The store is away, locked, full, read-only, corrupt or of a newer version; the text says which, and the cure."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two messages the same request."""

    tenant: str
    """Empty where it has none."""
    id: str
    """The `message_id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What a message says about itself, as far as the store compares it."""

    body_hash: bytes
    """16 bytes of the body as it was published: the same id with another body is a conflict."""
    mark: bytes
    """16 bytes of what tells one publish of a request from another (where its reply goes, when it was sent)."""
    redelivered: bool
    """Its last delivery was never settled: whoever worked on it has died, or lost its channel."""
    nonce: bytes = b""
    """8 bytes of this delivery alone: its claim, asked for again because the answer was lost, is the one it has."""
    dead_at_ms: int | None = None
    """Of a dead letter that was published again: when it had ended (ms since 1970)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How a request ended, as it is told to the requester, each time in the same words."""

    status: Literal["ok", "error"]
    code: str = ""
    """Of an error: one of `PROBLEMS`."""
    body: bytes
    """The Message's or the problem document's JSON."""
    headers: Mapping[str, str | int] = field(default_factory=dict)
    """Of the reply, beside its status: lane, model, provider, attempt, wait, run time."""
    ended_ms: int
    """By the clock of the worker that ended it; ms since 1970."""

    @property
    def is_untried(self) -> bool:
        """It failed before any attempt was made."""
        return self.status == "error" and self.headers.get(ATTEMPT) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The request is ours to work on. A higher token than any before: what an earlier holder completes is refused."""

    token: int
    deaths: int = 0
    """Holders before this one that never let go: they died or hung under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Another delivery of the same request is being worked on, and its lease is alive."""

    for_ms: int
    """Since its claim was granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """It has ended before."""

    completion: Completion
    same_copy: bool
    """By the mark: this very message had ended, and what follows the store may not have been done."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id was used with another body."""


class Stop(StrEnum):
    """Why a holder must stop."""

    CANCELLED = "cancelled"
    FENCED = "fenced"
    """Another delivery took the claim over."""


class Cancelling(StrEnum):
    """What a cancellation came to."""

    RECORDED = "recorded"
    """It ends as cancelled, wherever it waits."""
    UNSEEN = "unseen"
    """No worker has seen it: it is queued, or not published yet. It ends as cancelled when it comes."""
    DISPLACED = "displaced"
    """The same; and the oldest such one of its tenant was forgotten, because it has as many as are kept."""
    TOLD = "told"
    """It runs: its holder learns of it at the next renewal."""
    ENDED = "ended"
    """It had ended before."""


@dataclass(frozen=True, slots=True)
class Held:
    """A claim that a worker holds."""

    identity: Identity
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is known of a request. A completion where it has ended; else it runs, or waits for its next attempt."""

    completion: Completion | None
    running: bool
    attempts: int = 0
    due_ms: int | None = None
    """When its next attempt may begin, where it waits and that is known; ms since 1970."""


class Claims(Protocol):
    """One live holder an identity, one completion an identity."""

    async def claim(self, identity: Identity, copy: Copy) -> Granted | Running | Ended | Conflict:
        """Ask for the claim of a request, before its provider is called.

        Granted: nobody holds it, or the holder's lease has ended, or the holder has lost this very copy (it was
        redelivered). Ended: the request has ended. A dead letter that is published again still runs, also with another
        body: its `dead_at_ms` is the time of the stored error. Conflict: the id was used with another body. What was
        only noted (`note`) or deferred (`defer`) has no effect here.
        """
        ...

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Stop]:
        """Renew leases in one step. Those whose holder must stop; the others hold for another lease.

        What the store has forgotten is not among them: nobody else holds it, and its completion will be kept.
        """
        ...

    async def release(self, held: Held, *, attempts: int = 0, due_ms: int | None = None) -> None:
        """Give a claim up without a completion: it waits for its next attempt, which may begin at `due_ms`. Where it
        was taken over meanwhile, it is taken back that its holder had died."""
        ...

    async def defer(self, identity: Identity, *, due_ms: int, keep_until_ms: int) -> bool:
        """Keep, for whoever asks, that a request waits until it is due, and that nobody has claimed it yet.

        It binds nobody, and is forgotten at `keep_until_ms`. Nothing where the identity is claimed or has ended.
        Whether it may wait: false where it has ended.
        """
        ...

    async def complete(
        self, identity: Identity, copy: Copy, completion: Completion, *, token: int | None
    ) -> Completion | None:
        """Keep how a request ended. The first completion stays.

        The completion that holds: the one given, or the one that was there before. None where it may not be ended now:
        another delivery holds the claim (with `token`: it was taken over). `token` None: whoever completes it holds no
        claim (its time was over before it asked for one, or it is poison): as `claim` would be granted. Where `claim`
        would be a Conflict, the one given is given back and not kept: it is how this message ends, and binds nobody.
        """
        ...

    async def note(self, identity: Identity, completion: Completion) -> None:
        """Keep how a request ended that was refused before it could be claimed, for whoever asks for its result.

        It binds nobody: the same id with a better body runs. Nothing where the identity is claimed, deferred or ended.
        """
        ...

    async def cancel(self, identity: Identity, completion: Completion) -> Cancelling:
        """Have a request end as cancelled: at once where nobody works on it, else its holder is told."""
        ...


class Results(Protocol):
    """What can be read afterwards."""

    async def find(self, identity: Identity) -> Found | None:
        """What is known of a request; None of one that nobody has seen, or that was kept long enough."""
        ...

    async def sweep(self) -> int:
        """Remove what was kept long enough, and beyond the bound the oldest; how many. A bounded step: call it again
        while it removes something."""
        ...


class Room(StrEnum):
    """Whether there is room for one more that waits."""

    KEPT = "kept"
    TENANT_FULL = "tenant"
    """Its tenant has as many waiting as it may."""
    FULL = "all"
    """All tenants together have."""


class Waits(Protocol):
    """What waits in the broker because its publisher asked for it, by tenant; bounded by the store's spec."""

    async def reserve(self, identity: Identity, copy: Copy, *, weight: int, until_ms: int) -> Room:
        """Count a message until `until_ms`, for then it leaves the broker, whatever becomes of it. Once only where it
        was redelivered; each other message of the same request counts by itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What became of a wish for part of an allowance."""

    granted: bool
    used: float
    """In this period, with what was granted now."""
    resets_in_s: float


class Allowances(Protocol):
    """How much of something may be used in a period; periods are counted from 1970 (UTC days begin at midnight)."""

    async def take(self, name: str, amount: float, *, limit: float, period_s: int) -> Taken:
        """Use `amount` of what `limit` allows in each period, or nothing where that would be too much."""
        ...

    async def give_back(self, name: str, amount: float, *, period_s: int) -> None:
        """Correct what was taken in this period: a negative amount takes more, whatever the limit."""
        ...


class Leases(Protocol):
    """What only one process should do at a time (sweeping)."""

    async def hold(self, name: str, owner: str, *, for_s: float) -> int | None:
        """Take or renew a lease: its fencing token, higher for each new owner; None while another holds it."""
        ...

    async def let_go(self, name: str, owner: str) -> None:
        """End a lease before its time; nothing where another holds it."""
        ...


class Store(Claims, Results, Waits, Allowances, Leases, Protocol):
    """All five over one medium, open from `__aenter__` to `__aexit__`.

    A medium that cannot be used at first, or breaks later, is tried again by whoever calls: entering never fails.
    """

    @property
    def trouble(self) -> str | None:
        """Why the last call failed; None where it did not."""
        ...

    async def probe(self) -> None:
        """See that the store can be written, durably. Raises StoreUnavailable."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
