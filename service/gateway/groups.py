"""`/v1/groups`: a list of groups of requests (`consumers/state/groups.py`), how far one has come, its results, and its
cancellation. Message Batches, which are groups too, use the same (`batches.py`)."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Protocol

from aiohttp import web

from consumers.batches.groups import GroupCancelling
from consumers.clock import now_ms
from consumers.state.base import Completion, Found, Identity
from consumers.state.groups import (
    GROUP_STATUSES,
    GROUPS_PATH,
    NEWEST,
    GroupPlace,
    Member,
    State,
    StoredGroup,
    all_members,
    described,
)
from consumers.state.store import Store
from lanekeeper.contract.identity import is_request_id, is_tenant
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from service.config.settings import GatewayKey
from service.gateway.access import require_operator
from service.gateway.answers import StoredAnswers, Writing, in_one_line
from service.gateway.calls import limit_of, refuse_unknown
from service.gateway.problems import ApiError, answer
from service.gateway.requests import Known, LargeStatus, status_of

JSONL: Final = "application/x-jsonl"
PAGE: Final = 20
PAGE_AT_MOST: Final = 200
READ_AT_ONCE: Final = 200
LOOKED_AT: Final = 2000
"""A page of all tenants' groups looks at so many at most: it may have few, and `next`."""
NEWEST_SEEN: Final = 500
RUNNING_SHOWN: Final = 20
ENDED_SHOWN: Final = 5
_Handler = Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]


class Lines(Protocol):
    """How the results of a group are written, each in one line."""

    def of(self, member: Member) -> bytes | LargeStatus:
        """Empty: none."""

    def of_lost(self, member: Member, error: ApiError) -> bytes:
        """Of one whose answer was stored outside the store of results, and is there no longer."""


@dataclass(slots=True)
class GroupPaths:
    """The handlers of groups. All of them raise ApiError, LanekeeperError."""

    store: Store
    answers: StoredAnswers
    cancelling: GroupCancelling

    def handlers(self) -> Mapping[tuple[str, str], _Handler]:
        return {
            ("GET", GROUPS_PATH): self._list,
            ("GET", f"{GROUPS_PATH}/{{id}}"): self._get,
            ("GET", f"{GROUPS_PATH}/{{id}}/results"): self._results,
            ("DELETE", f"{GROUPS_PATH}/{{id}}"): self._delete,
        }

    async def _list(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        query = request.query
        refuse_unknown(query, ("status", "tenant", "limit", "after"))
        limit, statuses = limit_of(query, PAGE, 1, PAGE_AT_MOST), set(query.getall("status", GROUP_STATUSES))
        if not statuses <= set(GROUP_STATUSES):
            raise ApiError(400, f"status: allowed are {', '.join(GROUP_STATUSES)}")
        try:
            begin = GroupPlace.of(query["after"]) if "after" in query else NEWEST
        except ValueError:
            raise ApiError(400, "after: allowed is `next` of another page") from None
        tenant = query.get("tenant", None if caller.operator != "no" else caller.tenant or "")
        if tenant not in (None, caller.tenant or ""):
            require_operator(caller, acts=False)

        def is_meant(group: StoredGroup) -> bool:
            return group.status in statuses and (caller.operator != "no" or _is_own(group, caller))

        found, after = await _page(self.store, is_meant, tenant=tenant, limit=limit, after=begin)
        groups = [_described(group, of_tenant=caller.operator != "no") for group in found]
        return answer({"groups": groups, "next": None if after is None else str(after)})

    async def _get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        return answer(_described(await self._asked(request, caller, acts=False)))

    async def _results(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        group = await self._asked(request, caller, acts=False)
        if not _is_own(group, caller):
            raise ApiError(403, "results are their tenant's alone")
        return await self.stream(request, group, caller, RequestLines(), headers={"content-type": JSONL})

    async def _delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        group = await self._asked(request, caller, acts=True)
        if group.has_ended:
            return answer(_described(group))
        await self.cancelling.cancel(group.identity)
        return answer(_described(await self._asked(request, caller, acts=True)), status=202)

    async def _asked(self, request: web.Request, caller: GatewayKey, *, acts: bool) -> StoredGroup:
        id, own = request.match_info["id"], caller.tenant or ""
        tenant = request.query.get("tenant", own)
        if tenant != own:
            require_operator(caller, acts=acts)
        group = None
        if is_request_id(id) and (not tenant or is_tenant(tenant)):
            group = await self.store.group(Identity(tenant, id))
        if group is None or not _is_shown(group) or (caller.operator == "no" and not _is_own(group, caller)):
            raise ApiError(404, f"group {id[:128]!r} is not known, or is kept no longer")
        if not _is_own(group, caller):
            require_operator(caller, acts=acts)
        return group

    # ---- what Message Batches use too --------------------------------------------------------------------------------

    async def stream(
        self, request: web.Request, group: StoredGroup, caller: GatewayKey, lines: Lines, *, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        headers = {"cache-control": "no-store", **headers}
        writing = Writing(request, web.StreamResponse(headers=headers))
        try:
            async for members in all_members(self.store, group.identity):
                held: list[bytes] = []
                for member in members:
                    line = lines.of(member)
                    if isinstance(line, LargeStatus):
                        await writing.write(b"".join(held))
                        held.clear()
                        await writing.write_all(self._large(member, line, caller, lines))
                    else:
                        held.append(line)
                await writing.write(b"".join(held))
        except ConnectionError:
            return writing.response
        except (ApiError, LanekeeperError):
            if writing.has_begun and request.transport is not None:
                request.transport.abort()  # otherwise the client would take the lines that it has for all of them
            raise
        if not writing.has_begun:  # none has ended, or the store has removed all of them
            return web.Response(headers=headers)
        return await writing.end()

    async def _large(
        self, member: Member, line: LargeStatus, caller: GatewayKey, lines: Lines
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with self.answers.fetched(line.result, caller.tenant) as found:
                async for piece in found.pieces(begin=line.begin, end=line.end):
                    yield piece if piece is line.end else in_one_line(piece)
        except ApiError as error:
            if error.status != 410:
                raise
            yield lines.of_lost(member, error)


class RequestLines:
    """Implements `Lines`: each is the status of a request that has ended, as `GET /v1/requests/{id}` answers it."""

    def of(self, member: Member) -> bytes | LargeStatus:
        if member.completion is None:
            return b""
        found = Found(completion=member.completion, running=False, attempts=0)
        status = status_of(Known(member.id, found, None), now_ms=now_ms())
        if isinstance(status, LargeStatus):
            return LargeStatus(status.begin, status.result, status.end + b"\n")
        return in_one_line(status) + b"\n"

    def of_lost(self, member: Member, error: ApiError) -> bytes:
        assert member.completion is not None
        problem = RequestProblem("internal", error.message)
        lost = Completion(
            status="error",
            code=problem.code,
            body=problem.document(request=member.id, attempts=0),
            headers=member.completion.headers,
            ended_ms=member.completion.ended_ms,
        )
        line = self.of(Member(member.position, member.id, lost))
        assert isinstance(line, bytes)
        return line


def _is_shown(group: StoredGroup) -> bool:
    """Not while it is created, nor after it was removed."""
    return group.head.state is State.SEALED


def _is_own(group: StoredGroup, caller: GatewayKey) -> bool:
    return group.identity.tenant == (caller.tenant or "") and group.head.owner in (None, caller.name)


def _described(group: StoredGroup, *, of_tenant: bool = False) -> dict[str, Any]:
    found = described(group, now_ms=now_ms())
    return {**found, "tenant": group.identity.tenant} if of_tenant else found


# ---- lists -----------------------------------------------------------------------------------------------------------


async def overview(store: Store) -> list[dict[str, Any]]:
    """What the live page shows: of the newest groups of all tenants those that have not ended, and some that have."""
    found = [group for group in await store.newest_groups(most=NEWEST_SEEN) if _is_shown(group)]
    running = [group for group in found if not group.has_ended]
    ended = [group for group in found if group.has_ended]
    return [_described(group, of_tenant=True) for group in (*running[:RUNNING_SHOWN], *ended[:ENDED_SHOWN])]


async def _page(
    store: Store, is_meant: Callable[[StoredGroup], bool], *, tenant: str | None, limit: int, after: GroupPlace
) -> tuple[list[StoredGroup], GroupPlace | None]:
    """The next groups, and where the page after this one begins (None: there is none). `tenant`: None for all."""
    found: list[StoredGroup] = []
    looked_at = 0
    async with aclosing(_groups(store, tenant, after)) as groups:
        async for group in groups:
            if len(found) == limit or looked_at == LOOKED_AT:
                return found, after
            looked_at, after = looked_at + 1, group.place
            if _is_shown(group) and is_meant(group):
                found.append(group)
    return found, None


async def _groups(store: Store, tenant: str | None, after: GroupPlace) -> AsyncGenerator[StoredGroup, None]:
    if tenant is not None:
        for group in sorted(await store.groups_of(tenant), key=attrgetter("place"), reverse=True):
            if group.place < after:
                yield group
        return
    while some := await store.newest_groups(most=READ_AT_ONCE, after=after):
        for group in some:
            yield group
        after = some[-1].place
