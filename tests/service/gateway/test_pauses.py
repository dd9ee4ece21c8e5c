"""`/v1/pauses`: who may see and change them, and what a waiting request tells of its pause."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from service.gateway.access import hash_of
from tests.support.gate import Alone

KEYS = {
    hash_of("no"): {"tenant": "crm"},
    hash_of("look"): {"tenant": "ops", "operator": "look"},
    hash_of("act"): {"tenant": "ops", "operator": "act", "name": "night-shift"},
}
PAUSE = {"kind": "lane", "name": "batch", "why": "too dear"}


class Caller:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def call(self, method: str, path: str, *, key: str = "act", body: Any = None) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, self._url + path, data=data, headers={"x-api-key": key}) as got:
            return got.status, await got.json(content_type=None)


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Caller]:
    async with Alone(folder=folder, keys=KEYS) as made, aiohttp.ClientSession() as session:
        yield Caller(session, made.url)


async def test_a_pause_is_made_listed_replaced_and_ended(tmp_path: Path) -> None:
    async with gateway(tmp_path) as ops:
        status, made = await ops.call("POST", "/v1/pauses", body=PAUSE)
        assert (status, made["who"], made["until"]) == (200, "night-shift", None)
        until = "2199-01-01T00:00:00.000Z"
        _, made = await ops.call("POST", "/v1/pauses", body={**PAUSE, "until": until, "who": "ann"})
        assert (made["who"], made["until"]) == ("ann", until)
        assert await ops.call("GET", "/v1/pauses", key="look") == (200, {"pauses": [made]})

        assert await ops.call("DELETE", f"/v1/pauses/{made['id']}") == (200, made)
        assert (await ops.call("DELETE", f"/v1/pauses/{made['id']}"))[0] == 404
        assert await ops.call("GET", "/v1/pauses") == (200, {"pauses": []})


async def test_what_cannot_be_a_pause_is_refused_by_name(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "body: a JSON object": [],
        "kind 'queue' is not one of": {**PAUSE, "kind": "queue"},
        "no lane 'bach'; allowed: batch, critical, normal": {**PAUSE, "name": "bach"},
        "no tenant ''": {"kind": "tenant"},
        "'for' is unknown": {**PAUSE, "for": "1h"},
        "until is no time": {**PAUSE, "until": "2020-01-01T00:00:00Z"},
        "why: allowed are up to 300 printable": {**PAUSE, "why": "a\nb"},
        "name: allowed are up to 256": {"kind": "app", "name": 7},
    }
    async with gateway(tmp_path) as ops:
        for text, body in wrong.items():
            status, problem = await ops.call("POST", "/v1/pauses", body=body)
            assert status == 400
            assert text in problem["detail"]
        assert await ops.call("GET", "/v1/pauses") == (200, {"pauses": []})


async def test_half_of_a_surrogate_pair_in_an_operators_body_is_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path) as ops:
        for path in ("/v1/requests/cancel", "/v1/requests/replay", "/v1/dead/drop", "/v1/pauses"):
            status, told = await ops.call("POST", path, body={"tenant": "\ud800"})
            assert (status, told["detail"]) == (400, "body: a JSON object in UTF-8 is required")
