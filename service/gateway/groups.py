"""`/v1/groups`: how far a group of requests has come (`consumers/state/groups.py`), its results, and its cancellation.
Message Batches, which are groups too, use the same (`batches.py`)."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiohttp import web

from consumers.batches.groups import GroupCancelling
from consumers.clock import now_ms
from consumers.state.base import Completion, Found, Identity
from consumers.state.groups import Group, GroupedStore, Member, all_members, progress
from lanekeeper.contract.identity import is_request_id, is_tenant
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from service.config.settings import GatewayKey
from service.gateway.access import require_operator
from service.gateway.answers import StoredAnswers, Writing
from service.gateway.problems import ApiError, answer
from service.gateway.requests import Known, LargeStatus, status_of

GROUPS: Final = "/v1/groups"
JSONL: Final = "application/x-jsonl"
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

    store: GroupedStore
    answers: StoredAnswers
    cancelling: GroupCancelling

    def handlers(self) -> Mapping[tuple[str, str], _Handler]:
        return {
            ("GET", f"{GROUPS}/{{id}}"): self._get,
            ("GET", f"{GROUPS}/{{id}}/results"): self._results,
            ("DELETE", f"{GROUPS}/{{id}}"): self._delete,
        }

    async def _get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        return answer(_described(await self._asked(request, caller, acts=False)))

    async def _results(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        group = await self._asked(request, caller, acts=False)
        if group.identity.tenant != (caller.tenant or ""):
            raise ApiError(403, "results are their tenant's alone")
        return await self.stream(request, group, caller, RequestLines(), headers={"content-type": JSONL})

    async def _delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        group = await self._asked(request, caller, acts=True)
        if group.has_ended:
            return answer(_described(group))
        await self.cancelling.cancel(group.identity)
        return answer(_described(await self._asked(request, caller, acts=True)), status=202)

    async def _asked(self, request: web.Request, caller: GatewayKey, *, acts: bool) -> Group:
        id, tenant = request.match_info["id"], request.query.get("tenant", caller.tenant or "")
        is_own = tenant == (caller.tenant or "")
        if not is_own:
            require_operator(caller, acts=acts)
        group = None
        if is_request_id(id) and (not tenant or is_tenant(tenant)):
            group = await self.store.group(Identity(tenant, id))
        if group is None or (is_own and group.head.owner not in (None, caller.name)):
            raise ApiError(404, f"group {id[:128]!r} is not known, or is kept no longer")
        return group

    # ---- what Message Batches use too --------------------------------------------------------------------------------

    async def stream(
        self, request: web.Request, group: Group, caller: GatewayKey, lines: Lines, *, headers: Mapping[str, str]
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


def in_one_line(body: bytes) -> bytes:
    """JSON may have line ends between its words."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ")


def _described(group: Group) -> dict[str, Any]:
    results_url = f"{GROUPS}/{group.identity.id}/results"
    return {**progress(group, now_ms=now_ms()), "results_url": results_url}
