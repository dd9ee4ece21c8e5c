"""What the store keeps of a request whose progress clients can follow: how it was submitted, and its progress as
entries, numbered from 1. An entry is a step of the request (such as `queued`), or an event of the answer's stream.

Clients can follow requests that the gateway submitted (`follow`), and streamed requests without `reply_to`. The worker
that holds the claim appends entries; any process that uses the store can read them. Entries are kept as long as the
request's result.

Every method raises `StoreUnavailable` if the store cannot answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, Self

from consumers.state.base import Held, Identity, Store
from topology.codec.request import Request

QUEUED = "queued"
EVENT = "event"
"""The kind of an entry that is an event of the provider's stream. Entries of all other kinds are steps of the request,
such as `queued`."""
RESTART = "restart"
"""The kind of the entry that is added when another call to a provider begins. The store then removes the events of the
call before, and readers must discard them."""
ENTRIES_AT_ONCE = 200
"""The maximum number of entries of one request that one call of `Following.look` returns."""


class NewEntry(NamedTuple):
    """An entry to append to the progress of a request: one step, or one event of the answer's stream."""

    kind: str
    body: bytes
    """The entry's content as JSON text."""


class Entry(NamedTuple):
    """An entry in the progress of a request, with its number (from 1)."""

    number: int
    kind: str
    body: bytes


class Submission(NamedTuple):
    """What is stored of a request as its client submitted it, so that clients can follow it: a hash of its body, its
    lane, and when it was submitted, is due, and must be answered (ms since 1970). The names of the fields are those of
    the SQL columns."""

    body_hash: bytes
    """The hash of the request's body, as in `Fingerprint.body_hash`."""
    lane: str
    submitted_ms: int
    due_ms: int | None
    deadline_ms: int

    @classmethod
    def of(cls, request: Request, body_hash: bytes) -> Self:
        """Make the submission to store for this request."""
        return cls(
            body_hash=body_hash,
            lane=request.lane,
            submitted_ms=request.published.ms,
            due_ms=request.due_ms,
            deadline_ms=request.deadline_ms,
        )


class Submitted(StrEnum):
    """The result of `follow`: whether the request was submitted before."""

    NEW = "new"
    KNOWN = "known"
    """The same request (the same id with the same body) was submitted before, or a worker has received it."""
    CONFLICT = "conflict"
    """The id was used before with another body."""


@dataclass(frozen=True, slots=True)
class Part:
    """New entries (steps and events) of one request, in order, which the worker that holds the request's claim (`held`)
    appends to the request's stored progress."""

    held: Held
    submission: Submission
    """How the request was submitted. This is stored with the first entry if the request was published without the
    gateway, because then `follow` was not called."""
    entries: Sequence[NewEntry]


class Refused(StrEnum):
    """The reason why the store did not append entries to the stored progress of a request."""

    FENCED = "fenced"
    """The store does not append the entries, because the worker's claim was taken over or is lost, or the request has
    ended."""
    FULL = "full"
    """The store does not append the entries, because the request's events would exceed the limit of their number or
    bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The entries of a followed request after the last one that a client has read."""

    entries: Sequence[Entry] = ()
    last: int = 0
    """The number of the last entry that is stored for the request. `entries` may end before that one; the next call of
    `look` returns the rest."""
    ended: bool = False
    is_known: bool = True
    """False if the store does not know the request, or has already removed it."""


class Following(Protocol):
    """The part of the store that keeps the progress of requests, so that clients can follow them: how each was
    submitted, and entries for its steps and the events of its answer."""

    async def follow(
        self, identity: Identity, submission: Submission, *, first_entry: NewEntry, keep_until_ms: int
    ) -> Submitted:
        """Store the submission of a request that is about to be published, and its first entry. The submission and the
        entry are removed at `keep_until_ms` unless a worker sees the request before. Changes nothing if a worker has
        seen the request, or if it has ended."""

    async def unfollow(self, identity: Identity) -> None:
        """Remove the submission of a request that could not be published. Does nothing if a worker has seen the
        request."""

    async def submission(self, identity: Identity) -> Submission | None:
        """Returns a followed request as its client submitted it; None if the store does not know the request, or has
        already removed it."""

    async def append(self, parts: Sequence[Part]) -> Sequence[Refused | None]:
        """Append entries to several requests. Each request's entries are in one `Part`, and are appended together or
        not at all. Returns for each part why its entries were refused, or None if they were appended. A power cut may
        lose entries that were appended last."""

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[Look | None]:
        """Returns the new entries of several requests, each of which is given with the number of the last entry that
        was read. The result for a request is None if the store knows the request, it has not ended, and it has no new
        entries."""


class FollowedStore(Store, Following, Protocol):
    """The interface of a store for claims and results that also keeps the progress of requests for clients that follow
    them."""
