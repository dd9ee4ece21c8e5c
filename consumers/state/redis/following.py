"""Submissions and entries in Redis. Each step is one script, for one request or for many."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from consumers.state.base import Identity
from consumers.state.following import ENTRIES_AT_ONCE, Entry, Look, Part, Refused, Submission, Submitted, Told
from consumers.state.redis.client import Argument, RedisClient
from consumers.state.redis.following_scripts import APPEND, FOLLOW, LOOK, SUBMISSION, UNFOLLOW
from consumers.state.spec import StoreSpec

REQUESTS_IN_A_LOOK: Final = 200
"""Redis does nothing else while a script runs."""
ENTRIES_IN_A_LOOK: Final = 2000


def request_key(namespace: str, identity: Identity) -> str:
    """The key of a request's claim and result."""
    return f"{namespace}:request:{quote(identity.tenant, safe='')}:{identity.id}"


def followed_key(namespace: str, identity: Identity) -> str:
    """The key of a submission."""
    return f"{namespace}:followed:{quote(identity.tenant, safe='')}:{identity.id}"


class Followed:
    """Implements `Following`."""

    def __init__(self, client: RedisClient, *, namespace: str, spec: StoreSpec) -> None:
        self._client = client
        self._namespace = namespace
        self._keep_ms = round(spec.keep_s * 1000)
        self._limits = (spec.events_per_request, spec.event_bytes_per_request)

    async def follow(self, identity: Identity, submission: Submission, *, told: Told, keep_until_ms: int) -> Submitted:
        values = (keep_until_ms, told.kind, told.body, *_of_submission(submission))
        return Submitted((await self._client.run(FOLLOW, self._keys(identity), *values)).decode())

    async def unfollow(self, identity: Identity) -> None:
        await self._client.run(UNFOLLOW, self._keys(identity))

    async def submission(self, identity: Identity) -> Submission | None:
        body_hash, lane, streams, submitted, due, deadline = await self._client.run(
            SUBMISSION, [followed_key(self._namespace, identity)]
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
        keys = [key for each in parts for key in self._keys(each.held.identity)]
        values: list[Argument] = [self._keep_ms, *self._limits]
        for each in parts:
            values += [each.held.token, len(each.told), *_of_submission(each.submission)]
            values += [value for told in each.told for value in told]
        found = await self._client.run(APPEND, keys, *values)
        return [Refused(each.decode()) if each else None for each in found]

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> list[Look | None]:
        found: list[Look | None] = [None] * len(wanted)
        for begin in range(0, len(wanted), REQUESTS_IN_A_LOOK):
            some = wanted[begin : begin + REQUESTS_IN_A_LOOK]
            keys = [key for me, _ in some for key in self._keys(me)]
            numbers = [after for _, after in some]
            for at, last, ended, is_known, entries in await self._client.run(
                LOOK, keys, ENTRIES_AT_ONCE, ENTRIES_IN_A_LOOK, *numbers
            ):
                read = [_entry(each) for each in entries]
                found[begin + at] = Look(entries=read, last=last, ended=ended == 1, is_known=is_known == 1)
        return found

    def _keys(self, identity: Identity) -> list[str]:
        tenant = quote(identity.tenant, safe="")
        return [
            request_key(self._namespace, identity),
            followed_key(self._namespace, identity),
            f"{self._namespace}:entries:{tenant}:{identity.id}",
        ]


def _of_submission(said: Submission) -> tuple[Argument, ...]:
    due: Argument = "" if said.due_ms is None else said.due_ms
    return (said.body_hash, said.lane, int(said.streams), said.submitted_ms, due, said.deadline_ms)


def _entry(found: Sequence[Any]) -> Entry:
    number, (kind, body) = found
    return Entry(int(number.partition(b"-")[2]), kind.decode(), body)
