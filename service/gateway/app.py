"""The gateway: its paths, who may call them, and how it stops."""

import json
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from consumers.state.following import FollowedStore
from lanekeeper import Client
from lanekeeper.telemetry.tracing import Tracing
from service.config.gateway_section import LANES, GatewayKey
from service.config.settings import Settings
from service.gateway.access import Access, is_loopback
from service.gateway.asking import Reading
from service.gateway.bodies import Bodies
from service.gateway.described.asyncapi import asyncapi
from service.gateway.described.openapi import openapi
from service.gateway.documents import refusal
from service.gateway.events import Events
from service.gateway.following import Following
from service.gateway.looking import Looking
from service.gateway.lookups import Answering, LookupPaths
from service.gateway.messages import Messages
from service.gateway.problems import ApiError
from service.gateway.requests import Requests
from service.gateway.room import Room
from service.gateway.server import Handler
from service.gateway.sockets import Sockets
from service.gateway.speaking import Speaking
from topology.codec.decoding import PACKED_BYTES

_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
ABSENT_WITHIN_S = 5.0
"""How long a call waits for a broker that is not there: a lost connection is mostly open again by then."""
ANYBODY = "gateway"
"""The second word of routing keys where the broker's user cannot be one."""


def client_for(settings: Settings, tracing: Tracing | None = None) -> Client:
    """The connection on which a gateway publishes."""
    return Client(
        settings.broker_url,
        names=settings.names(),
        ssl_context=settings.ssl_context(),
        tracing=tracing,
        absent_within_s=ABSENT_WITHIN_S,
        identified=settings.needs_user_id,
        bodies=settings.body_store(),
    )


def bodies_of(settings: Settings) -> Bodies:
    """Bodies that are too large for a message are taken where there is a store for them."""
    spec = settings.bodies
    return Bodies(
        over_bytes=spec.over_bytes, most_bytes=PACKED_BYTES if settings.bodies_url is None else spec.most_bytes
    )


def _document(content: Mapping[str, Any]) -> Handler:
    body = json.dumps(content).encode()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    return answer


class Gateway:
    """What is served to applications. `client` and `store` are open as long as it serves."""

    def __init__(self, settings: Settings, client: Client, store: FollowedStore) -> None:
        spec = settings.gateway
        user = settings.credentials[0]
        here = GatewayKey(tenant=user if settings.needs_user_id else None, lanes=LANES)
        self._access = Access(spec.keys, local=here if is_loopback(spec.host) else None)
        self._speaking = Speaking(client, user=user)
        self._room = Room(spec.calls)
        self._client = client
        self._bodies = bodies_of(settings)
        self._looking = Looking(store, followers=spec.followers)
        reading = Reading(
            lanes={lane.name: lane for lane in settings.lane_specs()},
            app=user if _WORD.fullmatch(user) else ANYBODY,
            values=settings.json_values,
            cancel_abandoned=spec.cancel_abandoned,
        )
        self._messages = Messages(
            client, reading=reading, room=self._room, bodies=self._bodies, ping_every_s=spec.ping_every_s
        )
        self._requests = Requests(
            client, store, reading=reading, room=self._room, bodies=self._bodies, looking=self._looking
        )
        following = Following(self._requests, self._looking)
        self._events = Events(self._requests, following, self._looking, ping_every_s=spec.ping_every_s)
        self._sockets = Sockets(self._requests, following, self._looking, ping_every_s=spec.ping_every_s)
        self._lookups = LookupPaths(settings, room=self._room, body_bytes=self._bodies.most_bytes)
        lanes = [lane.name for lane in settings.lane_specs()]
        self._documents = {
            ("GET", "/openapi.json"): _document(openapi(lanes=lanes)),
            ("GET", "/asyncapi.json"): _document(asyncapi(names=settings.names(), lanes=lanes)),
        }

    def reasons(self) -> Mapping[str, str | None]:
        """What it needs before it takes calls, and what is wrong with it."""
        return {
            "gateway connection": self._client.trouble,
            "gateway": "it stops" if self._room.is_closed else None,
        }

    @property
    def calls(self) -> int:
        """Calls that are under way."""
        return self._room.calls

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        lookups = {at: partial(self._look_up, answer) for at, answer in self._lookups.answers().items()}
        return {
            ("POST", "/v1/messages"): self._post_messages,
            ("POST", "/v1/requests"): self._for_tenant(self._requests.post),
            ("GET", "/v1/requests/{id}"): self._for_tenant(self._requests.get),
            ("DELETE", "/v1/requests/{id}"): self._for_tenant(self._requests.delete),
            ("GET", "/v1/requests/{id}/events"): self._for_tenant(self._events.get),
            ("GET", "/v1/ws"): self._for_tenant(self._sockets.get),
            **lookups,
            **self._documents,
        }

    @property
    def largest_body(self) -> int:
        return self._bodies.most_bytes

    async def drained(self) -> None:
        self._looking.close()
        await self._room.emptied()

    def _for_tenant(self, handle: Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]) -> Handler:
        async def handled(request: web.Request) -> web.StreamResponse:
            try:
                caller = self._access.caller(request)
                await self._speaking.see_that_it_may(caller.tenant)
            except ApiError as error:
                return refusal(error)
            return await handle(request, caller)

        return handled

    async def aclose(self) -> None:
        self._bodies.close()
        await self._lookups.aclose()
        await self._looking.aclose()

    async def _post_messages(self, request: web.Request) -> web.StreamResponse:
        try:
            caller = self._access.caller(request)
            await self._speaking.see_that_it_may(caller.tenant)
            return await self._messages.answer(request, caller)
        except ApiError as error:
            return error.response(uuid.uuid4().hex)

    async def _look_up(self, answer: Answering, request: web.Request) -> web.StreamResponse:
        try:
            return await answer(request, self._access.caller(request))
        except ApiError as error:
            return error.response(uuid.uuid4().hex)
