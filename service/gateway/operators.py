"""What operators see and do: `/v1/lanes` (each key sees its own part), `/v1/pauses` (docs/brake.md), `/v1/dead`
(docs/dead-letters.md), and `/v1/requests` of all tenants."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Final

import structlog
from aiohttp import web
from cachetools import LRUCache

from consumers.brake import read_pause, too_many
from consumers.clock import now_ms
from consumers.state.base import Found, RequestFilter
from consumers.state.store import Store
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import AccessRefused, invalid_request
from lanekeeper.replies import ControlRefused
from lanekeeper.telemetry import signals
from service import requests
from service.config.settings import GatewayKey, Settings
from service.deadletters import (
    PAGE,
    PAGE_AT_MOST,
    AmbiguousId,
    DeadLetters,
    Filter,
    LetterEdit,
    ReplayRefused,
    position,
    whole,
)
from service.gateway.access import require_operator
from service.gateway.calls import Bodies, limit_of, refuse_unknown
from service.gateway.problems import ApiError, answer
from service.gateway.requests import Known, word_of
from service.status import Status, collect_status, probe_provider

FRESH_S: Final = 2.0
"""Calls within this time get the same figures, because each question is answered by all workers."""
REPLAYED_WITHIN_S: Final = 20.0
"""A replay ends after this long, and tells how many letters are left: proxies end calls that take longer."""
LISTS_AT_MOST: Final = 32
FILTERS: Final = {
    "id": "ids", "ids": "ids", "code": "codes", "lane": "lanes", "app": "apps", "tenant": "tenants", "cause": "causes",
}  # fmt: skip
REQUESTS_QUERY: Final = requests.FILTER_NAMES | {"limit", "after"}
LIST_QUERY: Final = FILTERS.keys() | {"since", "limit", "after"}
DROP_FIELDS: Final = (FILTERS.keys() - {"id"}) | {"since", "dry_run"}
REPLAY_FIELDS: Final = DROP_FIELDS | {"edit", "to_lane", "model", "rate"}
log = structlog.get_logger()


class OperatorPaths:
    """The handlers; all of them raise ApiError, LanekeeperError. `connection`: the gateway's own to the broker. Each
    call about dead letters has another one, so that what it holds returns when it fails."""

    def __init__(self, settings: Settings, store: Store, bodies: Bodies, *, connection: Connection | None) -> None:
        self._settings = settings
        self._store = store
        self._bodies = bodies
        self._connection = connection
        self._looking = asyncio.Lock()
        self._status: tuple[float, Status] | None = None
        self._listing = asyncio.Lock()
        self._lists: LRUCache[str, tuple[float, dict[str, Any]]] = LRUCache(LISTS_AT_MOST)
        """By query: until when it is shown again, because a scan of a long queue hides it for seconds."""

    def handlers(self) -> Mapping[tuple[str, str], Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]]:
        return {
            ("GET", "/v1/lanes"): self._lanes,
            ("GET", "/v1/pauses"): self._pauses,
            ("POST", "/v1/pauses"): self._pause,
            ("DELETE", "/v1/pauses/{id}"): self._resume,
            ("POST", "/v1/providers/{name}/probe"): self._probe,
            ("GET", "/v1/dead"): self._list,
            ("GET", "/v1/dead/{id}"): self._show,
            ("POST", "/v1/dead/replay"): self._replay,
            ("POST", "/v1/dead/drop"): self._drop_several,
            ("DELETE", "/v1/dead/{id}"): self._drop,
            ("GET", "/v1/requests"): self._requests,
            ("POST", "/v1/requests/cancel"): self._cancel_requests,
            ("POST", "/v1/requests/replay"): self._replay_requests,
        }

    async def status(self) -> Status:
        now_s = asyncio.get_running_loop().time
        async with self._looking:
            if self._status is None or now_s() - self._status[0] >= FRESH_S:
                assert self._connection is not None
                lanes, names = self._settings.lane_specs(), self._settings.names()
                self._status = now_s(), await collect_status(self._connection, lanes=lanes, names=names)
            return self._status[1]

    async def _lanes(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        return answer(visible_to(await self.status(), caller))

    async def _pauses(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=False)
        return answer({"pauses": [pause.as_json() for pause in await self._store.pauses()]})

    async def _pause(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=True)
        fields = await self._object_in(request, caller)
        fields["who"] = fields.get("who") or caller.name or caller.tenant or "gateway"
        pause = read_pause(fields, now_ms=now_ms(), known=self._settings.known_names())
        if not await self._store.pause(pause):
            raise too_many()
        log.info(signals.BRAKE_ASKED, command="pause", user=caller.tenant, pauses=[pause.as_json()])
        return answer(pause.as_json())

    async def _resume(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=True)
        if (pause := await self._store.resume(request.match_info["id"])) is None:
            raise ApiError(404, "nothing is paused under this id")
        log.info(signals.BRAKE_ASKED, command="resume", user=caller.tenant, pauses=[pause.as_json()])
        return answer(pause.as_json())

    async def _probe(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=True)
        assert self._connection is not None
        name = request.match_info["name"]
        log.info(signals.PROBE_ASKED, provider=name[:100], user=caller.tenant)
        try:
            found = await probe_provider(
                self._connection, name, names=self._settings.names(), user=self._settings.credentials[0]
            )
        except (ControlRefused, AccessRefused) as error:
            raise ApiError(
                503,
                f"the gateway's user of the broker may not ask workers to probe: {error}; it needs the rights of the "
                "exported role `operator`, and a place in the workers' LANEKEEPER_CONTROL__OPERATORS",
                headers={"x-should-retry": "false"},
            ) from error
        if found is None:
            raise ApiError(404, f"no worker has a provider {name[:100]!r}")
        self._status = None
        return answer(asdict(found))

    async def _list(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=False)
        refuse_unknown(request.query, LIST_QUERY)
        query, after = request.query, request.query.get("after")
        wanted, limit = _filter({name: query.getall(name) for name in query}), limit_of(query, PAGE, 0, PAGE_AT_MOST)
        try:
            begin = None if after is None else position(after)
        except ValueError:
            raise ApiError(400, "after: allowed is `next` of another page") from None
        async with self._listing:
            until_s, found = self._lists.get(request.query_string, (0.0, {}))
            if until_s < (began_s := time.monotonic()):
                async with self._letters() as letters:
                    overview = await letters.overview(wanted, limit=limit, after=begin)
                found = overview.as_json(jaeger_url=self._settings.traces_page)
                ended_s = time.monotonic()
                self._lists[request.query_string] = (ended_s + max(FRESH_S, 10 * (ended_s - began_s)), found)
        return answer(found)

    async def _show(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=False)
        async with self._letters() as letters:
            letter = await letters.find(_named(request))
        if letter is None:
            raise _unknown(request)
        return answer(whole(letter, jaeger_url=self._settings.traces_page))

    async def _drop(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=True)
        async with self._letters() as letters:
            dropped = await letters.drop(_named(request))
        self._lists.clear()
        if not dropped:
            raise _unknown(request)
        return answer({"dropped": dropped})

    async def _drop_several(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        asked, wanted = await self._letters_meant(request, caller, DROP_FIELDS)
        dry_run = _dry_run_in(asked)
        async with self._letters() as letters:
            matched = (await letters.overview(wanted, limit=0)).matched
            dropped = 0 if dry_run else await letters.drop(wanted, within_s=REPLAYED_WITHIN_S)
        self._lists.clear()
        return answer({"matched": matched, "dropped": dropped})

    async def _letters_meant(
        self, request: web.Request, caller: GatewayKey, known: Collection[str]
    ) -> tuple[dict[str, Any], Filter]:
        require_operator(caller, acts=True)
        refuse_unknown(request.query, ())
        asked = await self._object_in(request, caller)
        _refuse_unknown_fields(asked, known)
        wanted = _filter(asked)
        if wanted.is_empty:
            raise ApiError(400, "name the dead letters: ids, cause, code, lane, app, tenant, since")
        return asked, wanted

    async def _replay(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        asked, wanted = await self._letters_meant(request, caller, REPLAY_FIELDS)
        rate, dry_run, change = _rate_in(asked), _dry_run_in(asked), _edit_in(asked, "to_lane", "model")
        async with self._letters() as letters:
            done = await letters.replay(wanted, change, rate_per_s=rate, dry_run=dry_run, within_s=REPLAYED_WITHIN_S)
        self._lists.clear()
        return answer(done.as_json(), status=422 if done.refusals else 200)

    async def _requests(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=False)
        refuse_unknown(request.query, REQUESTS_QUERY)
        query = request.query
        wanted = _requests_in({name: query.getall(name) for name in query})
        limit = limit_of(query, requests.PAGE, 1, requests.PAGE_AT_MOST)
        try:
            found = await requests.page(self._store, wanted, _status, limit=limit, after=query.get("after"))
        except ValueError:
            raise ApiError(400, "after: allowed is `next` of another page") from None
        return answer(found)

    async def _cancel_requests(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        asked, wanted = await self._requests_meant(request, caller, requests.FILTER_NAMES | {"dry_run"})
        why = f"cancelled by an operator ({caller.name or caller.tenant or 'gateway'})"
        done = await requests.cancel(
            self._store, wanted, dry_run=_dry_run_in(asked), within_s=REPLAYED_WITHIN_S, why=why
        )
        return answer(done.as_json())

    async def _replay_requests(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        known = requests.FILTER_NAMES | {"edit", "to_lane", "rate", "dry_run"}
        asked, wanted = await self._requests_meant(request, caller, known)
        rate, dry_run, change = _rate_in(asked), _dry_run_in(asked), _edit_in(asked, "to_lane")
        async with self._letters() as letters:
            failed, done = await requests.replay(
                self._store, letters, wanted, change, rate_per_s=rate, dry_run=dry_run, within_s=REPLAYED_WITHIN_S
            )
        self._lists.clear()
        return answer({"failed": failed, **done.as_json()}, status=422 if done.refusals else 200)

    async def _requests_meant(
        self, request: web.Request, caller: GatewayKey, known: Collection[str]
    ) -> tuple[dict[str, Any], RequestFilter]:
        require_operator(caller, acts=True)
        refuse_unknown(request.query, ())
        asked = await self._object_in(request, caller)
        _refuse_unknown_fields(asked, known)
        wanted = _requests_in(asked)
        if wanted == RequestFilter():
            raise ApiError(400, f"name the requests: {', '.join(sorted(requests.FILTER_NAMES))}")
        return asked, wanted

    async def _object_in(self, request: web.Request, caller: GatewayKey) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        async with self._bodies.in_memory(request, caller, check=lambda body: fields.update(_object(body))):
            return fields

    @asynccontextmanager
    async def _letters(self) -> AsyncIterator[DeadLetters]:
        settings = self._settings
        try:
            async with Connection(
                settings.broker_url, name="lanekeeper: dead letters", ssl_context=settings.ssl_context()
            ) as connection:
                yield DeadLetters(settings, connection)
        except AmbiguousId as error:
            raise ApiError(409, str(error)) from error
        except AccessRefused as error:
            raise ApiError(
                503,
                "the gateway's user of the broker may not read or replay dead letters: it needs the rights of the "
                "exported role `operator`",
                headers={"x-should-retry": "false"},
            ) from error


def visible_to(status: Status, caller: GatewayKey) -> dict[str, Any]:
    """What this caller may see: its key's lanes, its own tenant; an operator all."""
    sees_all = caller.operator != "no"
    lanes = []
    for lane in status.lanes:
        if sees_all or caller.lanes is None or lane.lane in caller.lanes:
            begins = f"{lane.lane}: "
            tenants = status.tenants.get(lane.lane, {})
            lanes.append(
                {
                    **asdict(lane),
                    "spent": status.spent.get("lane", {}).get(lane.lane),
                    "waits_for": [line.removeprefix(begins) for line in status.waiting if line.startswith(begins)],
                    "tenants": {name: tenants[name] for name in tenants if sees_all or name == caller.tenant},
                }
            )
    if sees_all:
        return {**asdict(status), "lanes": lanes}
    return {"lanes": lanes, "accounts": status.accounts, "paused": status.paused, "breakers": status.breakers}


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()  # no half of a surrogate pair: no store can be asked for it
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid_request("body: a JSON object in UTF-8 is required")
    return found


def _filter(asked: Mapping[str, Any]) -> Filter:
    """Each field is a text, or a list of texts."""
    try:
        texts: dict[str, Any] = requests.texts_in(asked, FILTERS)
        return Filter(since_ms=requests.moment_in("since", asked.get("since")) or 0, **texts)
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _requests_in(asked: Mapping[str, Any]) -> RequestFilter:
    try:
        return requests.filter_of(asked)
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _status(id: str, found: Found) -> str:
    return word_of(Known(id, found, None), now_ms())


def _rate_in(asked: Mapping[str, Any]) -> float | None:
    rate: float | None = asked.get("rate")
    if not (rate is None or (type(rate) in (int, float) and 0.001 <= rate <= 100_000)):
        raise ApiError(400, "rate: allowed is a number from 0.001 to 100000, of requests a second")
    return rate


def _dry_run_in(asked: Mapping[str, Any]) -> bool:
    if type(dry_run := asked.get("dry_run", False)) is not bool:
        raise ApiError(400, "dry_run: allowed are true and false")
    return dry_run


def _edit_in(asked: Mapping[str, Any], *named: str) -> LetterEdit:
    names = {name: asked.get(name) for name in named}
    for name, value in names.items():
        if not (value is None or isinstance(value, str)):
            raise ApiError(400, f"{name}: allowed is a name")
    try:
        return LetterEdit(patch=asked.get("edit"), **names)
    except ReplayRefused as error:
        raise ApiError(400, f"edit: {error}") from error


def _refuse_unknown_fields(asked: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := sorted(asked.keys() - set(known)):
        raise ApiError(400, f"body: unknown field {unknown[0][:40]!r}; known: {', '.join(sorted(known))}")


def _named(request: web.Request) -> Filter:
    refuse_unknown(request.query, ("tenant",))
    tenants = frozenset(request.query.getall("tenant", ()))
    return Filter(ids=frozenset({request.match_info["id"]}), tenants=tenants)


def _unknown(request: web.Request) -> ApiError:
    return ApiError(404, f"no dead letter has the id {request.match_info['id'][:128]!r}")
