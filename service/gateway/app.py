"""Assembles the gateway: its HTTP paths, the check of who may call them, and how it stops."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib.resources import files
from typing import Any, Final

import structlog
from aiohttp import web

from consumers.background import Background, background_task, restarted
from consumers.batches.groups import GroupCancelling
from consumers.clock import now_ms
from consumers.state.base import QUEUED, NewEntry, Submission
from consumers.state.store import Store
from lanekeeper import Client, __version__
from lanekeeper.contract.problems import LanekeeperError, SettingsError
from lanekeeper.replies import ControlRefused, NotEnded
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing
from service.config.settings import GatewayKey, Settings
from service.gateway import openai
from service.gateway.access import Access, is_loopback
from service.gateway.accounts import Accounts
from service.gateway.answers import StoredAnswers
from service.gateway.batches import BatchPaths
from service.gateway.calls import BODIES_BYTES, Bodies, CallReader
from service.gateway.files import FilePaths
from service.gateway.groups import GroupPaths
from service.gateway.messages import FORMAT, AwaitedCalls, LookupPaths
from service.gateway.operators import OperatorPaths
from service.gateway.problems import ApiError, is_openai, path_unknown, refused
from service.gateway.requests import Poller, RequestPaths, SubmittedRequests, identity_of
from service.gateway.server import Handler, HttpConnection, descriptors
from service.gateway.shares import SharedLimit, Shares
from service.gateway.sockets import Sockets
from service.page.live import Live
from topology.codec.decoding import PACKED_BYTES

_ROUTING_KEY_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
ABSENT_WITHIN_S = 5.0
KEYS_EVERY_S: Final = 2.0
IDLE_CONNECTIONS: Final = 1000
_CallHandler = Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]
ASK_EVERY_S: Final = 60.0
ANYBODY = "gateway"
log = structlog.get_logger()


def client_for(settings: Settings, tracing: Tracing | None = None) -> Client:
    """The `Client` with which a gateway publishes requests."""
    return Client(
        settings.broker_url,
        names=settings.names(),
        ssl_context=settings.ssl_context(),
        tracing=tracing,
        absent_within_s=ABSENT_WITHIN_S,
        identified=settings.needs_user_id,
        bodies=settings.body_store(),
        fetches_answers=False,  # `answers.py` sends large answers to the HTTP client in pieces
    )


class Gateway:
    """The gateway's HTTP paths. `client` and `store` must stay open as long as it serves calls. `new_keys`: returns the
    keys if they have changed since the last call, else None; raises SettingsError."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        store: Store,
        *,
        new_keys: Callable[[], Mapping[str, GatewayKey] | None] = lambda: None,
    ) -> None:
        spec = settings.gateway
        user = settings.credentials[0]
        local = GatewayKey(tenant=user if settings.needs_user_id else None, operator="act")
        self._settings = settings
        self._client = client
        self._new_keys = new_keys
        self._access = Access(spec.keys, local=local if is_loopback(spec.host) else None, origins=spec.origins)
        self._speaker = SpeakerCheck(client, user=user)
        self._same_store = SameStore(client, store)
        self.connections = min(descriptors() // 2, spec.calls + spec.followers + IDLE_CONNECTIONS)
        self._in_use = SharedLimit(self.connections, "connections")
        self._shares = Shares(SharedLimit(spec.calls, "calls"), SharedLimit(BODIES_BYTES, "bytes"))
        own = settings.body_store()
        self._body_stores = [*([] if own is None else [own]), *settings.bodies.allowed_stores()]
        answers = StoredAnswers(self._body_stores, self._shares.parsing, most_bytes=settings.answer_bytes)
        call_reader = CallReader(
            lanes={lane.name: lane for lane in settings.lane_specs()},
            app=user if _ROUTING_KEY_WORD.fullmatch(user) else ANYBODY,
            max_values=settings.json_values,
            cancel_abandoned=spec.cancel_abandoned,
            names_keys=bool(settings.caps.keys),
            handlers=settings.handlers.keys(),
            pipelines={spec.name: spec for spec in settings.pipeline_specs()},
            has_batches=settings.has_message_batches,
        )
        # bodies that are too large for an AMQP message are accepted only if there is a store for them
        most_bytes = PACKED_BYTES if settings.bodies_url is None else settings.bodies.most_bytes
        bodies = Bodies(
            call_reader,
            self._shares,
            over_bytes=settings.bodies.over_bytes,
            most_bytes=most_bytes,
        )
        self._poller = Poller(store, self._access, followers=spec.followers)
        requests = SubmittedRequests(client, store, self._poller)
        ping_s = spec.ping_every_s
        awaited = partial(AwaitedCalls, client, bodies, answers, ping_every_s=ping_s)
        self._awaited = {
            "/v1/messages": awaited(format=FORMAT),
            openai.CHAT_PATH: awaited(format=openai.CHAT),
            openai.EMBEDDINGS_PATH: awaited(format=openai.EMBEDDINGS),
        }
        self._responses = openai.ResponsePaths(
            awaited(format=openai.RESPONSES), requests, bodies, answers, ping_every_s=ping_s
        )
        self._paths = RequestPaths(requests, bodies, answers, ping_every_s=ping_s)
        self._sockets = Sockets(requests, call_reader, self._shares, answers, ping_every_s=ping_s)
        self._accounts = Accounts(settings, self._access)
        self._files = FilePaths(settings, self._accounts, store, self._shares)
        self._lookups = LookupPaths(settings, bodies, self._accounts, self._files)
        self._groups = GroupPaths(store, answers, GroupCancelling(store))
        self._batches = BatchPaths(
            client,
            store,
            bodies,
            call_reader,
            self._groups,
            spec=spec,
            kept=settings.store_spec(),
            most_item_bytes=most_bytes,
        )
        connection = None if client.amqp is None else client.amqp.connection
        self._operators = OperatorPaths(settings, store, bodies, connection=connection)
        self._live = Live(self._operators.status, self._poller, store, jaeger_url=settings.traces_page)

    def reasons(self) -> Mapping[str, str | None]:
        return {
            "gateway connection": self._client.trouble,
            "gateway": "it stops" if self._shares.calls.is_closed else None,
        }

    @property
    def calls(self) -> int:
        return self._shares.calls.used

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        in_store: dict[tuple[str, str], _CallHandler] = {
            ("POST", "/v1/requests"): self._paths.post,
            ("GET", "/v1/requests/{id}"): self._paths.get,
            ("DELETE", "/v1/requests/{id}"): self._paths.delete,
            ("GET", "/v1/requests/{id}/events"): self._paths.events,
            ("GET", "/v1/ws"): self._sockets.get,
            **self._groups.handlers(),
            **self._batches.handlers(),
            **self._responses.handlers(),
        }
        handlers: dict[tuple[str, str], _CallHandler] = {
            **{("POST", path): partial(self._for_tenant, calls.answer) for path, calls in self._awaited.items()},
            **{at: partial(self._in_store, handle) for at, handle in in_store.items()},
            ("GET", "/v1/live"): self._live.follow,
            **self._lookups.handlers(),
            **{at: partial(_of_anthropic, handle) for at, handle in self._files.handlers().items()},
            **self._operators.handlers(),
        }
        return {
            **{at: partial(self._admitted, handle) for at, handle in handlers.items()},
            **self._live.handlers(),
            **{("GET", f"/{name}.json"): _served(name, self._settings) for name in ("openapi", "asyncapi")},
        }

    async def run(self) -> None:
        async with background_task(restarted(self._live.run, name="live page"), name="live page"):
            await restarted(self._read_keys, name="keys")

    async def _read_keys(self) -> None:
        while True:
            await asyncio.sleep(KEYS_EVERY_S)
            try:
                keys = await asyncio.to_thread(self._new_keys)
            except (SettingsError, OSError) as error:
                log.error(signals.KEYS_UNREAD, reason=str(error))
                keys = None
            if keys is not None:
                self._access.use(keys)
                log.info(signals.KEYS_READ, keys=len(keys))
            self._access.end_invalid()

    async def drained(self) -> None:
        self._poller.close()
        self._live.close()
        await self._shares.calls.close()

    async def aclose(self) -> None:
        self._shares.parsing.close()
        for store in self._body_stores:
            store.close()
        await self._files.aclose()
        await self._accounts.aclose()
        await self._poller.aclose()
        await self._same_store.aclose()

    async def _admitted(self, handle: _CallHandler, request: web.Request) -> web.StreamResponse:
        caller = self._access.caller(request)
        if isinstance(request.protocol, HttpConnection):
            request.protocol.admit()
        with self._in_use.taken(caller.tenant):
            return await handle(request, caller)

    async def _for_tenant(self, handle: _CallHandler, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        await self._speaker.check(caller.tenant)
        return await handle(request, caller)

    async def _in_store(self, handle: _CallHandler, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        await self._speaker.check(caller.tenant)
        self._same_store.ask_soon(caller)
        return await handle(request, caller)


async def _of_anthropic(handle: _CallHandler, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
    """OpenAI's API has this path too, and other things below it."""
    if is_openai(request):
        raise path_unknown(request)
    return await handle(request, caller)


def document(name: str, settings: Settings) -> dict[str, Any]:
    """One of the YAML documents in this folder (`openapi`, `asyncapi`), with the names of these settings."""
    import yaml  # here, because a process would start more slowly

    text = files("service.gateway").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    text = text.replace(": lane.", f": {settings.namespace}.")
    text = text.replace("[batch, critical, normal]", f"[{', '.join(lane.name for lane in settings.lane_specs())}]")
    found: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)  # seven times as fast as `safe_load`
    found["info"]["version"] = __version__
    return found


def _served(name: str, settings: Settings) -> Handler:
    # made at the first GET, in a thread, so that other calls are answered meanwhile
    @cache
    def made() -> bytes:
        return json.dumps(document(name, settings)).encode()

    async def get(request: web.Request) -> web.Response:
        return web.Response(body=await asyncio.to_thread(made), content_type="application/json")

    return get


class SpeakerCheck:
    """Checks that the workers let the gateway send requests of other tenants than its own AMQP user (`user`).

    Workers accept `x-lane-tenant` only from users in LANEKEEPER_SPEAKERS, and ignore it otherwise. If they ignored it
    for the gateway's user, all callers would share one tenant, and each could read the others' answers by their ids. So
    a worker is asked what workers answer only to such users: at each call, until one has answered."""

    def __init__(self, client: Client, *, user: str) -> None:
        self._client = client
        self._user = user
        self._is_accepted = False

    async def check(self, tenant: str | None) -> None:
        if self._is_accepted or tenant is None or tenant == self._user:
            return
        try:
            await self._client.result(uuid.uuid4().hex, tenant=tenant)
        except NotEnded:
            self._is_accepted = True
        except ControlRefused as error:
            if error.is_passing:
                raise refused(str(error)) from error
            raise ApiError(
                500,
                f"the workers do not believe the broker's user {self._user!r} whose requests these are: "
                "its name has to be in their LANEKEEPER_SPEAKERS",
                headers={"x-should-retry": "false"},
            ) from error
        except LanekeeperError as error:
            raise refused(f"whose request this is has to be told to a worker first: {error}") from error


class SameStore:
    """Logs an error if the workers use another store than this gateway: the status of submitted requests would stay
    `queued` for ever. At most once a minute, it stores a test request without publishing it, and asks a worker for its
    result. A worker with the same store answers that it waits, one with another store that it is unknown."""

    def __init__(self, client: Client, store: Store) -> None:
        self._client = client
        self._store = store
        self._background = Background()
        self._asked_at_s = -ASK_EVERY_S

    def ask_soon(self, caller: GatewayKey) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_at_s >= ASK_EVERY_S:
            self._asked_at_s = now_s
            self._background.begin(self._ask(caller), name="same store")

    async def aclose(self) -> None:
        await self._background.finish(within_s=0)

    async def _ask(self, caller: GatewayKey) -> None:
        with suppress(LanekeeperError):  # no worker answers, or the store cannot be reached: the check has no result
            if await self._is_another(caller):
                log.error(signals.OTHER_STORE, setting="LANEKEEPER_STORE_URL")

    async def _is_another(self, caller: GatewayKey) -> bool:
        id = uuid.uuid4().hex
        identity, at_ms = identity_of(id, caller), now_ms()
        unpublished = Submission(body_hash=b"", lane="", submitted_ms=at_ms, due_ms=None, deadline_ms=at_ms)
        keep_until_ms = at_ms + int(1000 * ASK_EVERY_S)
        await self._store.follow(
            identity, unpublished, first_entry=NewEntry(QUEUED, b"{}"), keep_until_ms=keep_until_ms
        )
        try:
            await self._client.result(id, tenant=caller.tenant)
        except NotEnded as answer:
            return answer.status == "unknown"
        finally:
            await self._store.unfollow(identity)
        return False
