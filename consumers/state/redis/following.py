"""Keeps in Redis the progress of requests that clients follow: how each was submitted, and entries for its steps and
events. Each method runs one script; `look` runs one for each 200 requests."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from consumers.state.base import Identity
from consumers.state.following import ENTRIES_AT_ONCE, Entry, Look, NewEntry, Part, Refused, Submission, Submitted
from consumers.state.redis.client import Argument, RedisClient
from consumers.state.redis.following_scripts import APPEND, FOLLOW, LOOK, SUBMISSION, UNFOLLOW
from consumers.state.spec import StoreSpec

REQUESTS_IN_A_LOOK: Final = 200
"""For how many requests one run of the script reads entries. The number is small, because Redis does nothing else while
a script runs."""
ENTRIES_IN_A_LOOK: Final = 2000
"""The most entries that one run of the script returns for all its requests; the next run returns the rest."""


class Followed:
    """Implements `Following` in Redis: the progress of requests, which clients can follow."""

    def __init__(self, client: RedisClient, *, namespace: str, spec: StoreSpec) -> None:
        self._client = client
        self._namespace = namespace
        self._keep_ms = round(spec.keep_s * 1000)
        self._limits = (spec.events_per_request, spec.event_bytes_per_request)

    async def follow(
        self, identity: Identity, submission: Submission, *, first_entry: NewEntry, keep_until_ms: int
    ) -> Submitted:
        values = (keep_until_ms, first_entry.kind, first_entry.body, *_of_submission(submission))
        return Submitted((await self._client.run(FOLLOW, self._keys(identity), *values)).decode())

    async def unfollow(self, identity: Identity) -> None:
        await self._client.run(UNFOLLOW, self._keys(identity))

    async def submission(self, identity: Identity) -> Submission | None:
        body_hash, lane, streams, submitted, due, deadline = await self._client.run(
            SUBMISSION, self._keys(identity)[1:2]
        )
        if body_hash is None:
            return None
        return Submission(
            body_hash=body_hash,
            lane=lane.decode(),
            streams=streams == b"1",
            submitted_ms=int(submitted),
            due_ms=int(due) if due else None,
            deadline_ms=int(deadline),
        )

    async def append(self, parts: Sequence[Part]) -> list[Refused | None]:
        keys = [key for part in parts for key in self._keys(part.held.identity)]
        values: list[Argument] = [self._keep_ms, *self._limits]
        for part in parts:
            values += [part.held.token, len(part.entries), *_of_submission(part.submission)]
            values += [value for entry in part.entries for value in entry]
        found = await self._client.run(APPEND, keys, *values)
        return [Refused(reason.decode()) if reason else None for reason in found]

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> list[Look | None]:
        found: list[Look | None] = [None] * len(wanted)
        for begin in range(0, len(wanted), REQUESTS_IN_A_LOOK):
            batch = wanted[begin : begin + REQUESTS_IN_A_LOOK]
            keys = [key for identity, _ in batch for key in self._keys(identity)]
            numbers = [after for _, after in batch]
            for at, last, ended, is_known, entries in await self._client.run(
                LOOK, keys, ENTRIES_AT_ONCE, ENTRIES_IN_A_LOOK, *numbers
            ):
                read = [_entry(entry) for entry in entries]
                found[begin + at] = Look(entries=read, last=last, ended=ended == 1, is_known=is_known == 1)
        return found

    def _request(self, identity: Identity) -> str:
        """The Redis key of a request's claim and result."""
        return f"{self._namespace}:request:{quote(identity.tenant, safe='')}:{identity.id}"

    def _keys(self, identity: Identity) -> list[str]:
        """The three Redis keys of a request: of its claim and result, of its submission, and of its entries."""
        begin, end = self._namespace, f"{quote(identity.tenant, safe='')}:{identity.id}"
        return [f"{begin}:request:{end}", f"{begin}:followed:{end}", f"{begin}:entries:{end}"]


def _of_submission(submission: Submission) -> tuple[Argument, ...]:
    due: Argument = "" if submission.due_ms is None else submission.due_ms
    streams, submitted_ms = int(submission.streams), submission.submitted_ms
    return (submission.body_hash, submission.lane, streams, submitted_ms, due, submission.deadline_ms)


def _entry(found: Sequence[Any]) -> Entry:
    number, (kind, body) = found
    return Entry(int(number.partition(b"-")[2]), kind.decode(), body)
