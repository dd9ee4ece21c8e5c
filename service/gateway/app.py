"""Assembles the gateway: its HTTP paths, the check of who may call them, and how it stops."""

import re
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
from service.gateway.bodies import Bodies
from service.gateway.call_limit import CallLimit
from service.gateway.call_reader import CallReader
from service.gateway.described.asyncapi import asyncapi
from service.gateway.described.openapi import openapi
from service.gateway.described.served import served
from service.gateway.lookups import LookupPaths
from service.gateway.messages import Messages
from service.gateway.polling import Poller
from service.gateway.positions import Positions
from service.gateway.request_paths import RequestPaths
from service.gateway.requests import Requests
from service.gateway.same_store import SameStore
from service.gateway.server import Handler
from service.gateway.sockets import Sockets
from service.gateway.speaker_check import SpeakerCheck
from topology.codec.decoding import PACKED_BYTES

_ROUTING_KEY_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
ABSENT_WITHIN_S = 5.0
"""For how many seconds an HTTP call waits until the gateway's connection to the broker is open. A connection that was
lost is usually open again within this time."""
_CallHandler = Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]
ANYBODY = "gateway"
"""The second word (the application) of the routing keys of a gateway's requests, if the name of the gateway's AMQP user
contains characters that are not allowed there."""


def client_for(settings: Settings, tracing: Tracing | None = None) -> Client:
    """Make the `Client` with which a gateway publishes requests."""
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
        own = settings.body_store()
        self._body_stores = [*([] if own is None else [own]), *settings.bodies.allowed_stores()]
        answers = Answers(self._body_stores, most_bytes=settings.answer_bytes)
        self._poller = Poller(store, followers=spec.followers)
        call_reader = CallReader(
            lanes={lane.name: lane for lane in settings.lane_specs()},
            app=user if _ROUTING_KEY_WORD.fullmatch(user) else ANYBODY,
            max_values=settings.json_values,
            cancel_abandoned=spec.cancel_abandoned,
        )
        self._bodies = Bodies(
            call_reader,
            self._limit,
            over_bytes=settings.bodies.over_bytes,
            # bodies that are too large for an AMQP message are accepted only if there is a store for them
            most_bytes=PACKED_BYTES if settings.bodies_url is None else settings.bodies.most_bytes,
        )
        self._messages = Messages(client, bodies=self._bodies, answers=answers, ping_every_s=spec.ping_every_s)
        requests = Requests(client, store, poller=self._poller, positions=Positions(client, store))
        self._paths = RequestPaths(
            requests, self._poller, bodies=self._bodies, answers=answers, ping_every_s=spec.ping_every_s
        )
        self._sockets = Sockets(
            requests,
            self._poller,
            call_reader=call_reader,
            limit=self._limit,
            answers=answers,
            ping_every_s=spec.ping_every_s,
        )
        self._same_store = SameStore(client, store)
        self._lookups = LookupPaths(settings, self._bodies)
        lanes = [lane.name for lane in settings.lane_specs()]
        self._documents = {
            ("GET", "/openapi.json"): served(partial(openapi, lanes=lanes)),
            ("GET", "/asyncapi.json"): served(partial(asyncapi, names=settings.names(), lanes=lanes)),
        }

    def reasons(self) -> Mapping[str, str | None]:
        """The parts that must work before the gateway accepts calls. The value of each is its problem, or None if the
        part works."""
        return {"gateway connection": self._client.trouble, "gateway": "it stops" if self._limit.is_closed else None}

    @property
    def calls(self) -> int:
        """The number of HTTP calls in progress."""
        return self._limit.calls

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        in_store: dict[tuple[str, str], _CallHandler] = {
            ("POST", "/v1/requests"): self._paths.post,
            ("GET", "/v1/requests/{id}"): self._paths.get,
            ("DELETE", "/v1/requests/{id}"): self._paths.delete,
            ("GET", "/v1/requests/{id}/events"): self._paths.events,
            ("GET", "/v1/ws"): self._sockets.get,
        }
        return {
            ("POST", "/v1/messages"): partial(self._for_tenant, self._messages.answer),
            **{at: partial(self._in_store, handle) for at, handle in in_store.items()},
            **{at: partial(self._look_up, handle) for at, handle in self._lookups.handlers().items()},
            **self._documents,
        }

    @property
    def largest_body(self) -> int:
        return self._bodies.most_bytes

    async def drained(self) -> None:
        self._poller.close()
        await self._limit.close()

    async def aclose(self) -> None:
        self._bodies.close()
        for store in self._body_stores:
            store.close()
        await self._lookups.aclose()
        await self._poller.aclose()
        await self._same_store.aclose()

    async def _for_tenant(self, handle: _CallHandler, request: web.Request) -> web.StreamResponse:
        caller = self._access.caller(request)
        await self._speaker.check(caller.tenant)
        return await handle(request, caller)

    async def _in_store(self, handle: _CallHandler, request: web.Request) -> web.StreamResponse:
        caller = self._access.caller(request)
        await self._speaker.check(caller.tenant)
        self._same_store.ask_soon(caller)
        return await handle(request, caller)

    async def _look_up(self, handle: _CallHandler, request: web.Request) -> web.StreamResponse:
        return await handle(request, self._access.caller(request))
