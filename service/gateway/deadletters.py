"""`/v1/dead`: dead letters of all tenants, for callers whose key is an operator's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final

from aiohttp import web
from multidict import MultiMapping

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import AccessRefused
from service.config.settings import GatewayKey, Settings
from service.deadletters import PAGE, PAGE_AT_MOST, Change, DeadLetters, Filter, ReplayRefused, position, whole
from service.gateway.access import require_operator
from service.gateway.calls import Bodies
from service.gateway.problems import ApiError, answer

REPLAYED_WITHIN_S: Final = 20.0
"""A replay ends after this long, and tells how many letters are left: proxies end calls that take longer."""
LEAST_AGE_S: Final = 2.0
LISTS_AT_MOST: Final = 32
FILTERS: Final = {
    "id": "ids", "code": "codes", "lane": "lanes", "app": "apps", "tenant": "tenants", "cause": "causes",
}  # fmt: skip
_CHANGES: Final = {"edit", "to_lane", "model", "rate", "dry_run"}


class DeadLetterPaths:
    """The handlers. Each call has a connection of its own, so that what it holds returns when it fails."""

    def __init__(self, settings: Settings, bodies: Bodies) -> None:
        self._settings = settings
        self._bodies = bodies
        self._listing = asyncio.Lock()
        self._lists: dict[str, tuple[float, dict[str, Any]]] = {}
        """By query: until when it is shown again, because a scan of a long queue hides it for seconds."""

    def handlers(self) -> Mapping[tuple[str, str], Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]]:
        return {
            ("GET", "/v1/dead"): self._list,
            ("GET", "/v1/dead/{id}"): self._show,
            ("POST", "/v1/dead/replay"): self._replay,
            ("DELETE", "/v1/dead/{id}"): self._drop,
        }

    async def _list(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=False)
        wanted, query = _filter_of(request.query), request.query
        limit, after = query.get("limit", str(PAGE)), query.get("after")
        if not (limit.isascii() and limit.isdigit() and int(limit[:4]) <= PAGE_AT_MOST):
            raise ApiError(400, f"limit: allowed is a whole number from 0 to {PAGE_AT_MOST}")
        try:
            begin = None if after is None else position(after)
        except ValueError:
            raise ApiError(400, "after: allowed is `next` of another page") from None
        async with self._listing:
            until_s, found = self._lists.get(request.query_string, (0.0, {}))
            if until_s < (began_s := time.monotonic()):
                async with self._letters() as letters:
                    overview = await letters.overview(wanted, limit=int(limit), after=begin)
                found = overview.as_json(jaeger_url=self._settings.traces_page)
                ended_s = time.monotonic()
                while len(self._lists) >= LISTS_AT_MOST:
                    del self._lists[next(iter(self._lists))]
                self._lists[request.query_string] = (ended_s + max(LEAST_AGE_S, 10 * (ended_s - began_s)), found)
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

    async def _replay(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=True)
        asked: dict[str, Any] = {}
        async with self._bodies.in_memory(request, caller, check=lambda body: asked.update(_asked(body))):
            pass
        wanted, rate = _wanted(asked), asked.get("rate")
        if wanted.is_empty:
            raise ApiError(400, "name the dead letters: ids, cause, code, lane, app, tenant, since")
        if not (rate is None or (type(rate) in (int, float) and 0.001 <= rate <= 100_000)):
            raise ApiError(400, "rate: allowed is a number from 0.001 to 100000, of requests a second")
        if type(dry_run := asked.get("dry_run", False)) is not bool:
            raise ApiError(400, "dry_run: allowed are true and false")
        names = {name: asked.get(name) for name in ("to_lane", "model")}
        for name, value in names.items():
            if not (value is None or isinstance(value, str)):
                raise ApiError(400, f"{name}: allowed is a name")
        try:
            change = Change(patch=asked.get("edit"), **names)
        except ReplayRefused as error:
            raise ApiError(400, f"edit: {error}") from error
        async with self._letters() as letters:
            done = await letters.replay(wanted, change, rate_per_s=rate, dry_run=dry_run, within_s=REPLAYED_WITHIN_S)
        self._lists.clear()
        return answer(done.as_json(), status=422 if done.refusals else 200)

    @asynccontextmanager
    async def _letters(self) -> AsyncIterator[DeadLetters]:
        settings = self._settings
        try:
            async with Connection(
                settings.broker_url, name="lanekeeper: dead letters", ssl_context=settings.ssl_context()
            ) as connection:
                yield DeadLetters(settings, connection)
        except AccessRefused as error:
            raise ApiError(
                503,
                "the gateway's user of the broker may not read or replay dead letters: it needs the rights of the "
                "exported role `operator`",
                headers={"x-should-retry": "false"},
            ) from error


def _asked(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise ApiError(400, "body: allowed is a JSON object")
    known = {"ids", "since", *FILTERS, *_CHANGES} - {"id"}
    if unknown := sorted(asked.keys() - known):
        raise ApiError(400, f"body: unknown field {unknown[0][:40]!r}; known: {', '.join(sorted(known))}")
    return asked


def _wanted(asked: Mapping[str, Any]) -> Filter:
    """Each field is a text, or a list of texts."""
    found: dict[str, Any] = {}
    for name, field in {**FILTERS, "ids": "ids"}.items():
        if (given := asked.get(name)) is None:
            continue
        values = given if isinstance(given, list) else [given]
        if not values or not all(isinstance(value, str) for value in values):
            raise ApiError(400, f"{name}: allowed is a text, or a list of texts that is not empty")
        found[field] = frozenset(values)
    return Filter(since_ms=_since_ms(asked.get("since")), **found)


def _filter_of(query: MultiMapping[str]) -> Filter:
    found = {field: frozenset(query.getall(name, ())) for name, field in FILTERS.items()}
    return Filter(since_ms=_since_ms(query.get("since")), **found)


def _since_ms(text: object) -> int:
    if text is None:
        return 0
    try:
        when = datetime.fromisoformat(str(text))
        if when.tzinfo is not None:
            return int(1000 * when.timestamp())
    except (ValueError, OverflowError):
        pass
    raise ApiError(400, "since: allowed is a time with its zone, such as 2026-11-21T18:00:00Z")


def _named(request: web.Request) -> Filter:
    tenants = frozenset(request.query.getall("tenant", ()))
    return Filter(ids=frozenset({request.match_info["id"]}), tenants=tenants)


def _unknown(request: web.Request) -> ApiError:
    return ApiError(404, f"no dead letter has the id {request.match_info['id'][:128]!r}")
