"""The gateway: its paths, who may call them, and how it stops."""

import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from aiohttp import web

from consumers.state.following import FollowedStore
from lanekeeper import Client
from lanekeeper.telemetry.tracing import Tracing
from service.config.gateway_section import LANES, GatewayKey
from service.config.settings import Settings
from service.gateway.access import Access, is_loopback
from service.gateway.answers import Answers
from service.gateway.asking import CallReader
from service.gateway.bodies import Bodies
from service.gateway.call_limit import CallLimit
from service.gateway.described.asyncapi import asyncapi
from service.gateway.described.openapi import openapi
from service.gateway.described.served import Served
from service.gateway.documents import refusal
from service.gateway.events import Events
from service.gateway.following import Following
from service.gateway.looking import Looking
from service.gateway.lookups import Answering, LookupPaths
from service.gateway.messages import Messages
from service.gateway.positions import Positions
from service.gateway.problems import ApiError
from service.gateway.requests import Requests
from service.gateway.same_store import SameStore
from service.gateway.server import Handler
from service.gateway.sockets import Sockets
from service.gateway.speaker_check import SpeakerCheck
from topology.codec.decoding import PACKED_BYTES

_ROUTING_KEY_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
ABSENT_WITHIN_S = 5.0
"""For how many seconds an HTTP call waits for a connection to the broker. A connection that was lost is usually open
again within this time."""
ANYBODY = "gateway"
"""The second word (the application) of the routing keys of a gateway's requests, if the name of the gateway's AMQP user
contains characters that are not allowed there."""


def client_for(settings: Settings, tracing: Tracing | None = None) -> Client:
    """Make the client with which a gateway publishes requests."""
    return Client(
        settings.broker_url,
        names=settings.names(),
        ssl_context=settings.ssl_context(),
        tracing=tracing,
        absent_within_s=ABSENT_WITHIN_S,
        identified=settings.needs_user_id,
        bodies=settings.body_store(),
        fetches_answers=False,  # `answers.py` sends large answers from the store to the HTTP client in pieces
    )


def bodies_of(settings: Settings) -> Bodies:
    """Make the reader of HTTP calls' bodies. Bodies that are too large for a message are accepted only if there is a
    store for them."""
    spec = settings.bodies
    return Bodies(
        over_bytes=spec.over_bytes, most_bytes=PACKED_BYTES if settings.bodies_url is None else spec.most_bytes
    )


class Gateway:
    """The gateway's HTTP paths and their handlers. `client` and `store` must stay open as long as the gateway serves
    calls."""

    def __init__(self, settings: Settings, client: Client, store: FollowedStore) -> None:
        spec = settings.gateway
        user = settings.credentials[0]
        local = GatewayKey(tenant=user if settings.needs_user_id else None, lanes=LANES)
        self._access = Access(spec.keys, local=local if is_loopback(spec.host) else None)
        self._speaker = SpeakerCheck(client, user=user)
        self._limit = CallLimit(spec.calls)
        self._client = client
        self._bodies = bodies_of(settings)
        own = settings.body_store()
        self._body_stores = [*([] if own is None else [own]), *settings.bodies.allowed_stores()]
        answers = Answers(self._body_stores, most_bytes=settings.answer_bytes)
        self._looking = Looking(store, followers=spec.followers)
        call_reader = CallReader(
            lanes={lane.name: lane for lane in settings.lane_specs()},
            app=user if _ROUTING_KEY_WORD.fullmatch(user) else ANYBODY,
            max_values=settings.json_values,
            cancel_abandoned=spec.cancel_abandoned,
        )
        self._messages = Messages(
            client,
            call_reader=call_reader,
            limit=self._limit,
            bodies=self._bodies,
            answers=answers,
            ping_every_s=spec.ping_every_s,
        )
        self._requests = Requests(
            client,
            store,
            call_reader=call_reader,
            limit=self._limit,
            bodies=self._bodies,
            answers=answers,
            looking=self._looking,
            positions=Positions(client, store),
        )
        self._same_store = SameStore(client, store)
        following = Following(self._requests, self._looking)
        self._events = Events(following, answers=answers, ping_every_s=spec.ping_every_s)
        self._sockets = Sockets(
            following, answers=answers, max_values=settings.json_values, ping_every_s=spec.ping_every_s
        )
        self._lookups = LookupPaths(settings, calls=self._limit, bodies=self._bodies)
        lanes = [lane.name for lane in settings.lane_specs()]
        self._documents = {
            ("GET", "/openapi.json"): Served(partial(openapi, lanes=lanes)).get,
            ("GET", "/asyncapi.json"): Served(partial(asyncapi, names=settings.names(), lanes=lanes)).get,
        }

    def reasons(self) -> Mapping[str, str | None]:
        """The parts that must work before the gateway accepts calls, each with its problem or None."""
        return {"gateway connection": self._client.trouble, "gateway": "it stops" if self._limit.is_closed else None}

    @property
    def calls(self) -> int:
        """The number of HTTP calls in progress."""
        return self._limit.calls

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
        await self._limit.close()

    def _for_tenant(self, handle: Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]) -> Handler:
        async def handled(request: web.Request) -> web.StreamResponse:
            try:
                caller = self._access.caller(request)
                await self._speaker.check(caller.tenant)
            except ApiError as error:
                return refusal(error)
            self._same_store.ask_soon(caller)
            return await handle(request, caller)

        return handled

    async def aclose(self) -> None:
        self._bodies.close()
        for store in self._body_stores:
            store.close()
        await self._lookups.aclose()
        await self._looking.aclose()
        await self._same_store.aclose()

    async def _post_messages(self, request: web.Request) -> web.StreamResponse:
        try:
            caller = self._access.caller(request)
            await self._speaker.check(caller.tenant)
            return await self._messages.answer(request, caller)
        except ApiError as error:
            return error.response(uuid.uuid4().hex)

    async def _look_up(self, answer: Answering, request: web.Request) -> web.StreamResponse:
        try:
            return await answer(request, self._access.caller(request))
        except ApiError as error:
            return error.response(uuid.uuid4().hex)
