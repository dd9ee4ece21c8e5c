"""The gateway: its paths, who may call them, and how it stops."""

import re
import uuid
from collections.abc import Mapping
from functools import partial

from aiohttp import web

from lanekeeper import Client
from lanekeeper.telemetry.tracing import Tracing
from service.config.gateway_section import LANES, GatewayKey
from service.config.settings import Settings
from service.gateway.access import Access, is_loopback
from service.gateway.asking import Reading
from service.gateway.lookups import Answering, LookupPaths
from service.gateway.messages import Messages
from service.gateway.problems import ApiError
from service.gateway.room import Room
from service.gateway.server import Handler
from service.gateway.speaking import Speaking

_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
ANYBODY = "gateway"
"""The second word of routing keys where the broker's user cannot be one."""


def client_for(settings: Settings, tracing: Tracing | None = None) -> Client:
    """The connection on which a gateway publishes."""
    return Client(
        settings.broker_url,
        names=settings.names(),
        ssl_context=settings.ssl_context(),
        tracing=tracing,
        identified=settings.needs_user_id,
    )


class Gateway:
    """What is served to applications. `client` is open as long as it serves."""

    def __init__(self, settings: Settings, client: Client) -> None:
        spec = settings.gateway
        user = settings.credentials[0]
        here = GatewayKey(tenant=user if settings.needs_user_id else None, lanes=LANES)
        self._access = Access(spec.keys, local=here if is_loopback(spec.host) else None)
        self._speaking = Speaking(client, user=user)
        self._room = Room(spec.calls)
        self._client = client
        self._messages = Messages(
            client,
            reading=Reading(
                lanes={lane.name: lane for lane in settings.lane_specs()},
                app=user if _WORD.fullmatch(user) else ANYBODY,
                values=settings.json_values,
                cancel_abandoned=spec.cancel_abandoned,
            ),
            room=self._room,
            ping_every_s=spec.ping_every_s,
        )
        self._lookups = LookupPaths(settings, room=self._room)

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
        return {("POST", "/v1/messages"): self._post_messages, **lookups}

    async def drained(self) -> None:
        await self._room.emptied()

    async def aclose(self) -> None:
        await self._lookups.aclose()

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
