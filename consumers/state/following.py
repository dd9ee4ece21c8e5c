"""What the store keeps of a request whose life can be followed: when it was submitted, and entries, numbered from 1.

Followed are requests that the gateway submitted (`follow`), and streamed ones without `reply_to`. Their worker appends
the entries; any process that uses the store reads them. They are kept as long as the request's result.

Every method raises `StoreUnavailable` if the store cannot answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from consumers.state.base import Held, Identity, Store

QUEUED = "queued"
EVENT = "event"
"""An event of the provider's stream. All other kinds tell of the request's life."""
RESTART = "restart"
"""Forget the events before: they are removed, and those of another call follow."""
ENTRIES_AT_ONCE = 200
"""The most entries of one request that one look returns."""


class Told(NamedTuple):
    """An entry to append."""

    kind: str
    body: bytes
    """JSON."""


class Entry(NamedTuple):
    """An entry that was appended."""

    number: int
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What was submitted. Times are ms since 1970."""

    body_hash: bytes
    """As in `Copy`."""
    lane: str
    streams: bool
    submitted_ms: int
    due_ms: int | None
    deadline_ms: int


class Submitted(StrEnum):
    """The result of `follow`."""

    NEW = "new"
    KNOWN = "known"
    """The same request was submitted before."""
    CONFLICT = "conflict"
    """The id was used with another body."""


@dataclass(frozen=True, slots=True)
class Part:
    """Entries of one claim, in order."""

    held: Held
    submission: Submission
    """For a request that nobody submitted by `follow`: it was published without the gateway."""
    told: Sequence[Told]


class Refused(StrEnum):
    """Why entries were not appended."""

    FENCED = "fenced"
    """The claim was taken over or forgotten, or the request has ended."""
    FULL = "full"
    """The events would exceed their limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is new of a request."""

    entries: Sequence[Entry] = ()
    last: int = 0
    """The number of its last entry, which may come with the next look."""
    ended: bool = False
    is_known: bool = True
    """False: the store knows nothing of it, or has forgotten it."""


class Following(Protocol):
    """Submissions and entries."""

    async def follow(self, identity: Identity, submission: Submission, *, told: Told, keep_until_ms: int) -> Submitted:
        """Store that a request is about to be published, with its first entry, until a worker sees it. A request that
        a worker has seen, or that has ended, is not changed."""

    async def unfollow(self, identity: Identity) -> None:
        """Forget a submission that was not published. Does nothing if a worker has seen the request."""

    async def submission(self, identity: Identity) -> Submission | None:
        """What was submitted; None: not known."""

    async def append(self, parts: Sequence[Part]) -> Sequence[Refused | None]:
        """Append entries, those of each part together or not at all. Need not survive a power cut."""

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[Look | None]:
        """For each request what is new after an entry's number; None: nothing."""


class FollowedStore(Store, Following, Protocol):
    """A store that can do both."""
