"""Groups: requests that belong together, with one state, one count of how they have ended, and one list of results.
Here is what is decided about a group, for every engine.

A group comes to be with the first request that names it (`x-lane-group`), or is created as a whole: a Message Batch of
the gateway. That is `open` while its requests are published, and no worker runs one of them. Its creator then seals it,
from which moment on they run. If the creator dies before, its lease ends: the group is `void`, and workers drop its
requests. So all of them run, or none.

How many requests a group has, how many of them have ended, and how, is counted by the changes of the requests' rows
(`Counted`). It has ended when as many have ended as its requests say that it has.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote, unquote

from consumers.clock import moment_text
from consumers.state import decisions
from consumers.state.base import NO_LABELS, Completion, Identity, InGroup, Labels, number_of
from consumers.state.decisions import CANCELLED, Change, Row, Times
from consumers.state.requests import Requests
from topology.codec.decoding import app_of
from topology.lanes import MIB

Kind = Literal["processing", "succeeded", "errored", "canceled", "expired"]
KINDS: Final[tuple[Kind, ...]] = ("processing", "succeeded", "errored", "canceled", "expired")
"""Anthropic's words for the requests of a batch."""
GroupStatus = Literal["in_progress", "cancelling", "ended"]
GROUP_STATUSES: Final[tuple[GroupStatus, ...]] = ("in_progress", "cancelling", "ended")
GROUPS_PATH: Final = "/v1/groups"
EXPIRED: Final = "deadline_exceeded"
MEMBERS_AT_ONCE: Final = 200
ENDED_AT_ONCE: Final = 100
PREDICTED_AT_MOST_MS: Final = 100 * 365 * 86_400_000
"""An end that is further away is not predicted: beyond the year 9999 it would be no date."""
MEMBER_BYTES: Final = 4 * MIB
"""So much of the results of a group is read at a time, unless one is larger."""


class State(StrEnum):
    """How far a group has come. `VOID`: it counts as one that never was."""

    OPEN = "open"
    SEALED = "sealed"
    VOID = "void"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is stored of a group besides its counts. Times are ms since 1970."""

    state: State = State.OPEN
    lease_ms: int = 0
    """An open group is void from then on, if it was neither sealed nor its lease renewed."""
    owner: str | None = None
    """The name of the API key that created it, which alone may see it. None: it came to be with a request, and all keys
    of its tenant see it."""
    digest: str = ""
    """Of what was submitted: the same id with another digest is a conflict."""
    size_bytes: int = 0
    created_ms: int
    expires_ms: int = 0
    """When its last request ends at the latest."""
    keep_ms: int
    cancelled_ms: int = 0
    """When it was cancelled; 0: it was not."""
    is_live: bool = False
    """Whether its requests go into no provider's batch."""

    def as_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def of_json(cls, text: str | bytes) -> "Head":
        found = json.loads(text)
        return cls(**{**found, "state": State(found["state"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group as it is at this moment."""

    identity: Identity
    head: Head
    counts: Mapping[Kind, int]
    last_ended_ms: int
    """When the last of the requests that have ended did so; 0: none has."""
    size: int
    """The most requests that one of them says it has; 0: none says."""
    key: str
    """The routing key of the first request that was seen."""
    webhook: str
    saved_usd: float

    @property
    def place(self) -> "GroupPlace":
        return GroupPlace(self.head.created_ms, self.identity.tenant, self.identity.id)

    @property
    def ended(self) -> int:
        """How many of its requests have ended."""
        return sum(self.counts.values()) - self.counts["processing"]

    @property
    def has_ended(self) -> bool:
        is_whole = 0 < self.size <= self.ended
        return self.head.state is State.SEALED and is_whole and not self.counts["processing"]

    @property
    def status(self) -> GroupStatus:
        return "ended" if self.has_ended else "cancelling" if self.head.cancelled_ms else "in_progress"

    def has_lapsed(self, now_ms: int) -> bool:
        return self.head.state is State.OPEN and self.head.lease_ms <= now_ms


class GroupPlace(NamedTuple):
    """The place of a group in the list of all tenants' groups, in which the newest are the first."""

    created_ms: int
    tenant: str
    id: str

    def __str__(self) -> str:
        return f"{self.created_ms}.{quote(self.tenant, safe='').replace('.', '%2E')}.{self.id}"

    @classmethod
    def of(cls, text: str) -> "GroupPlace":
        """Raises ValueError."""
        created_ms, tenant, id = text.split(".", 2)
        return cls(number_of(created_ms), unquote(tenant), id)


NEWEST: Final = GroupPlace(1 << 53, "", "")
"""Before the first group."""


class Opened(StrEnum):
    """Whether a group was created now."""

    NEW = "new"
    KNOWN = "known"
    """It was created before, with the same requests."""
    BUSY = "busy"
    """Another call is creating it."""
    CONFLICT = "conflict"
    """It was created before, with other requests."""


class Member(NamedTuple):
    """A request of a group. `position`: its place in the group, for the next page."""

    position: int
    id: str
    completion: Completion | None
    """None: it has not ended."""


class GroupChange(NamedTuple):
    """What was decided about a group. `head`: as it is to be; None: as it was."""

    answer: "Opened | StoredGroup | None"
    head: Head | None = None


Decide = Callable[[StoredGroup | None, int], GroupChange]
"""Decides about a group at a time (ms since 1970). None: the store knows none with this id."""


# ---- what is decided about a group -----------------------------------------------------------------------------------


def open_new(group: StoredGroup | None, now_ms: int, *, head: Head) -> GroupChange:
    """A group that is void may be created again, with the same requests; so may one that the store had lost, of which
    requests were seen since."""
    if group is None or group.head.owner is None:
        return GroupChange(Opened.NEW, head)
    if group.head.digest != head.digest:
        return GroupChange(Opened.CONFLICT)
    if group.head.state is State.SEALED:
        return GroupChange(Opened.KNOWN)
    if group.head.state is State.OPEN and not group.has_lapsed(now_ms):
        return GroupChange(Opened.BUSY)
    return GroupChange(Opened.NEW, head)


def renew(group: StoredGroup | None, now_ms: int, *, lease_ms: int) -> GroupChange:
    """Answers None if the group is not open any more."""
    if group is None or group.head.state is not State.OPEN or group.has_lapsed(now_ms):
        return GroupChange(None)
    return GroupChange(group, replace(group.head, lease_ms=lease_ms))


def seal(group: StoredGroup | None, now_ms: int) -> GroupChange:
    """Answers None if the group is not open any more."""
    if group is None or group.head.state is not State.OPEN or group.has_lapsed(now_ms):
        return GroupChange(None)
    head = replace(group.head, state=State.SEALED)
    return GroupChange(replace(group, head=head), head)


def look(group: StoredGroup | None, now_ms: int) -> GroupChange:
    """A group that has lapsed becomes void for good, so that no worker drops a request of a group that is sealed."""
    if group is None or not group.has_lapsed(now_ms):
        return GroupChange(group)
    return _void(group)


def discard(group: StoredGroup | None, _: int) -> GroupChange:
    """A group that is open becomes void: its creator gives up."""
    if group is None or group.head.state is not State.OPEN:
        return GroupChange(group)
    return _void(group)


def remove(group: StoredGroup | None, _: int) -> GroupChange:
    """A group that has ended becomes void."""
    if group is None or not group.has_ended:
        return GroupChange(group)
    return _void(group)


def _void(group: StoredGroup) -> GroupChange:
    head = replace(group.head, state=State.VOID)
    return GroupChange(replace(group, head=head), head)


def cancel(group: StoredGroup | None, now_ms: int) -> GroupChange:
    """Requests that run go on; no other one begins."""
    if group is None or group.has_ended or group.head.state is not State.SEALED or group.head.cancelled_ms:
        return GroupChange(group)
    head = replace(group.head, cancelled_ms=now_ms)
    return GroupChange(replace(group, head=head), head)


# ---- what is told about it -------------------------------------------------------------------------------------------


def progress(group: StoredGroup, *, now_ms: int) -> dict[str, Any]:
    """As JSON, for users."""
    head, ended, left = group.head, group.ended, max(group.size - group.ended, group.counts["processing"])
    found: dict[str, Any] = {
        "id": group.identity.id,
        "status": group.status,
        "counts": {
            "in_progress": left,
            "completed": group.counts["succeeded"],
            "failed": group.counts["errored"] + group.counts["expired"],
            "cancelled": group.counts["canceled"],
        },
        "created_at": moment_text(head.created_ms),
    }
    if group.size:
        found["size"] = group.size
    if group.saved_usd:
        found["saved_usd"] = round(group.saved_usd, 6)
    if head.cancelled_ms:
        found["cancelled_at"] = moment_text(head.cancelled_ms)
    if group.has_ended:
        found["ended_at"] = moment_text(group.last_ended_ms)
    elif group.size and ended:  # at the pace so far
        so_far_ms = max(0, now_ms - head.created_ms)
        if (left_ms := so_far_ms * left // ended) <= PREDICTED_AT_MOST_MS:
            found["predicted_end_at"] = moment_text(now_ms + left_ms)
    return found


def described(group: StoredGroup, *, now_ms: int) -> dict[str, Any]:
    """As JSON, over HTTP and for its webhook."""
    found = {**progress(group, now_ms=now_ms), "results_url": f"{GROUPS_PATH}/{group.identity.id}/results"}
    return {**found, "lane": group.key.partition(".")[0]} if group.key else found


def unknown(id: str) -> dict[str, Any]:
    """What is told of a group of which no request was seen yet, or whose results are kept no longer."""
    counts = dict.fromkeys(("in_progress", "completed", "failed", "cancelled"), 0)
    return {"id": id, "status": "unknown", "counts": counts}


# ---- how its requests are counted ------------------------------------------------------------------------------------


class Counted(NamedTuple):
    """What a change of a request's row changes in its group. `was`: None if it is a new member. `ended_ms`: when it
    ended; 0: it has not. `keep_ms`: so long the group is kept at least."""

    group: InGroup
    was: Kind | None
    now: Kind
    ended_ms: int
    keep_ms: int
    saved_usd: float


def counted(before: Row | None, change: Change[Any]) -> Counted | None:
    """None: nothing changes."""
    after = change.row
    if not isinstance(after, Row) or after.group_id is None:
        return None
    was = None if before is None or before.group_id is None else kind_of(before)
    now = kind_of(after)
    if was == now:
        return None
    group = change.group
    if group is None or group.id != after.group_id:  # the first message of a request decides
        group = InGroup(after.group_id)
    ended_ms = after.ended_ms or 0 if after.ended else 0
    return Counted(group, was, now, ended_ms, after.keep_ms, change.saved_usd)


def named(at: Times, counts: Counted) -> Head:
    """Of a group that comes to be with a request that names it."""
    return Head(state=State.SEALED, created_ms=at.today, keep_ms=counts.keep_ms)


def kind_of(row: Row) -> Kind:
    """As what a request counts."""
    if not row.ended:
        return "processing"
    if row.status == "ok":
        return "succeeded"
    return "canceled" if row.code == CANCELLED else "expired" if row.code == EXPIRED else "errored"


# ---- the store -------------------------------------------------------------------------------------------------------


class Groups(Requests, ABC):
    """What the store keeps of groups. All methods raise StoreUnavailable."""

    @abstractmethod
    async def change_group(self, identity: Identity, decide: Decide) -> Any:
        """Decide about a group, and swap its head. Returns the answer."""

    @abstractmethod
    async def groups_of(self, tenant: str) -> Sequence[StoredGroup]:
        """All groups of a tenant, in no order. No list or count has those that are void."""

    @abstractmethod
    async def newest_groups(self, *, most: int, after: GroupPlace = NEWEST) -> Sequence[StoredGroup]:
        """The next groups of all tenants, the newest first."""

    @abstractmethod
    async def ended_groups(self) -> Sequence[StoredGroup]:
        """Some groups, of any tenant, that have ended, and whose end was not told (`end_was_told`)."""

    @abstractmethod
    async def end_was_told(self, identity: Identity) -> None: ...

    @abstractmethod
    async def count_groups(self, tenant: str) -> int:
        """How many groups of a tenant are kept."""

    @abstractmethod
    async def members(
        self, group: Identity, *, after: int = 0, most: int = MEMBERS_AT_ONCE, bodies: bool = True
    ) -> Sequence[Member]:
        """The next of a group's requests, in the order in which they joined it. Without `bodies`, results are empty;
        with them, fewer are returned if they are large (`MEMBER_BYTES`), but at least one."""

    @abstractmethod
    async def remove_members(self, group: Identity) -> int:
        """Remove some requests of a group with their results. Returns how many; 0: none is left."""

    async def open_group(self, identity: Identity, head: Head) -> Opened:
        opened: Opened = await self.change_group(identity, partial(open_new, head=head))
        return opened

    async def join(self, tenant: str, group: InGroup, ids: Sequence[str], *, keep_until_ms: int) -> bool:
        """Note that these requests, which are about to be published, belong to a group. Returns False if one of them is
        known without it."""
        labels = Labels(group.key.partition(".")[0], app_of(group.key)) if group.key else NO_LABELS
        decide = partial(decisions.join, group=group, keep_until_ms=keep_until_ms, labels=labels)
        done = await self.change_all("join", [(Identity(tenant, id), decide) for id in ids], bodies=False)
        return all(change.answer for change in done)

    async def renew_group(self, identity: Identity, *, lease_ms: int) -> bool:
        """Returns False if the group is not open any more."""
        return await self.change_group(identity, partial(renew, lease_ms=lease_ms)) is not None

    async def seal_group(self, identity: Identity) -> StoredGroup | None:
        """Returns None if the group was not open any more."""
        return await self._changed(identity, seal)

    async def group(self, identity: Identity) -> StoredGroup | None:
        return await self._changed(identity, look)

    async def discard_group(self, identity: Identity) -> StoredGroup | None:
        return await self._changed(identity, discard)

    async def remove_group(self, identity: Identity) -> StoredGroup | None:
        return await self._changed(identity, remove)

    async def cancel_group(self, identity: Identity) -> StoredGroup | None:
        return await self._changed(identity, cancel)

    async def _changed(self, identity: Identity, decide: Decide) -> StoredGroup | None:
        group: StoredGroup | None = await self.change_group(identity, decide)
        return group

    async def cancel_waiting(self, requests: Sequence[tuple[Identity, Completion]]) -> None:
        """Cancel requests of a group that are not running."""
        wanted = [(each, partial(decisions.cancel_waiting, completion=end, spec=self.spec)) for each, end in requests]
        await self.change_all("cancel", wanted, bodies=False)


async def all_members(
    store: Groups, identity: Identity, *, bodies: bool = True
) -> AsyncGenerator[Sequence[Member], None]:
    """All of a group's requests, in pages. Raises StoreUnavailable."""
    after = 0
    while members := await store.members(identity, after=after, bodies=bodies):
        yield members
        after = members[-1].position
