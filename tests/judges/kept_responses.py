"""Responses that OpenAI's API keeps: in the background, or to be retrieved. The simulated API keeps none: through
Lanekeeper, the gateway does."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from service.simulated.faults import Refusal
from service.simulated.messages import Asked, Output
from service.simulated.openai import RESPONSES_PATH, invalid, response, response_events
from service.simulated.sending import json_answer, stream_headers


@dataclass(slots=True)
class _Stored:
    """A response that can be retrieved. `events`: those of its stream."""

    response: dict[str, Any]
    events: list[bytes] = field(default_factory=list)
    running: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class KeptResponses:
    """The responses that can be retrieved, cancelled and deleted."""

    def __init__(self) -> None:
        self._stored: dict[str, _Stored] = {}

    def keep(self, asked: Asked, response: dict[str, Any]) -> None:
        """Of one that was answered."""
        if asked.fields.get("store") is not False:
            self._add(_Stored(response))

    async def begin(
        self,
        request: web.BaseRequest,
        asked: Asked,
        output: Output,
        *,
        id: str,
        headers: Mapping[str, str],
        duration_s: float,
        deltas: int,
    ) -> web.StreamResponse:
        """Answer a call for a response in the background."""
        stored = _Stored(response(asked, output, id=id, status="queued"))
        self._add(stored)
        events = response_events(asked, output, id=id, deltas=deltas)

        async def run() -> None:
            for event in events:
                await asyncio.sleep(duration_s / len(events))
                stored.events.append(event)
                stored.changed.set()
            stored.response = response(asked, output, id=id)

        stored.running = asyncio.create_task(run(), name="response in the background")
        if asked.stream:
            return await self._follow(request, stored, headers, after=-1)
        return json_answer(stored.response, dict(headers))

    async def answer(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        """Retrieve, cancel or delete. Raises `Refusal`."""
        id, _, action = request.path.removeprefix(f"{RESPONSES_PATH}/").partition("/")
        if (stored := self._stored.get(id)) is None:
            message = f"Response with id '{id[:100]}' not found."
            raise Refusal(404, message, outcome="not_found")
        match request.method, action:
            case "GET", "":
                if request.query.get("stream") == "true":
                    return await self._follow(
                        request, stored, headers, after=int(request.query.get("starting_after", "-1"))
                    )
                return json_answer(stored.response, headers)
            case "DELETE", "":
                del self._stored[id]
                return json_answer({"id": id, "object": "response", "deleted": True}, headers)
            case "POST", "cancel":
                if not stored.response["background"]:
                    raise invalid("Cannot cancel a synchronous response.", param="response_id")
                if stored.running is not None and not stored.running.done():
                    stored.running.cancel()
                    stored.changed.set()
                    stored.response = {**stored.response, "status": "cancelled"}
                return json_answer(stored.response, headers)
        raise Refusal(404, "Not found", outcome="not_found")

    def _add(self, stored: _Stored) -> None:
        self._stored[stored.response["id"]] = stored

    async def _follow(
        self, request: web.BaseRequest, stored: _Stored, headers: Mapping[str, str], *, after: int
    ) -> web.StreamResponse:
        if stored.running is None:
            raise invalid("Only a response of a background request with a stream can be streamed.", param="stream")
        answer = web.StreamResponse(headers=stream_headers(headers))
        await answer.prepare(request)
        sent = after + 1
        while True:
            stored.changed.clear()
            await answer.write(b"".join(stored.events[sent:]))
            sent = max(sent, len(stored.events))
            if stored.running.done():
                break
            waiting = asyncio.create_task(stored.changed.wait())
            await asyncio.wait((waiting, stored.running), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        await answer.write(b"".join(stored.events[sent:]))
        await answer.write_eof()
        return answer
