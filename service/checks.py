"""The checks of `lanekeeper check`: each finding says what is wrong and how to correct it. Some of them are risks that
the production profile does not accept: with it, a process that finds one does not start. docs/production.md describes
every risk."""

import asyncio
import stat
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Final
from urllib.parse import unquote, urlsplit

import structlog

from consumers.failures import AccountError, OverloadedError, ProviderError, RateLimitedError, RejectedError
from consumers.providers.errors import error_line
from consumers.providers.registry import Provider
from consumers.providers.routes import Routes
from consumers.state import SQLITE, open_store, redis_risks
from consumers.state.base import StoreUnavailable
from consumers.state.redis_url import SentinelUrl
from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.bodies import BodiesUnavailable, BodyError
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import ANTHROPIC_MESSAGES, BROKER_TIMESTAMP_MS, CANCEL_KEY, SENT_MS, Names
from lanekeeper.contract.problems import AccessRefused, BrokerBlocked, BrokerError, SettingsError
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing
from service.config.names import variable
from service.config.settings import FIRST, Settings
from service.config.value_types import mask_url
from service.connections import connection_for, management_of
from service.gateway.access import is_loopback
from service.status import gather
from service.worker.assembly import key_setting, open_provider
from topology.broker.admin import check_write_rights, verify
from topology.broker.consume import Inbox
from topology.declaration import RECOMMENDED, Broker, declare, is_before
from topology.plan import Difference

log = structlog.get_logger()
CALL_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one of the checks that `lanekeeper check` makes."""

    what: str
    well: bool | None
    """Whether the check passed. None: the check does not apply here, or its result is only a warning; neither counts as
    a failure."""
    text: str


async def providers(settings: Settings) -> list[Finding]:
    """Calls all providers, each with its models; also finds lanes whose default model no provider has."""
    spec = settings.routes_spec()
    models_of: dict[str, set[str]] = {provider.name: set() for provider in spec.providers}
    without_route: list[Finding] = []
    routes = Routes(spec)
    for provider in spec.providers:  # a provider without any lane's default model is checked with a model of its table
        models_of[provider.name].update(list((provider.models or {}).values())[:1])
    speaks_anthropic = any(ANTHROPIC_MESSAGES in provider.dialects for provider in spec.providers)
    for lane in settings.lane_specs() if speaks_anthropic else ():  # a lane's default model is one of Anthropic's
        chain = routes.of(lane.name, "", lane.model)
        for route in chain.routes:
            models_of[route.provider].add(route.name)
        if chain.forbidden:
            text = f"{chain.forbidden}; set {variable(('lanes', lane.name, 'model'))}, or add it to a provider's models"
            without_route.append(Finding(f"lane {lane.name}", False, text))
    found = await asyncio.gather(*(_provider(settings, name, sorted(models)) for name, models in models_of.items()))
    return [*found, *without_route]


async def _provider(settings: Settings, name: str, models: list[str]) -> Finding:
    what = f"provider {name}"
    try:
        provider = open_provider(settings, name)
    except SettingsError as error:
        return Finding(what, False, str(error))
    try:
        results = await asyncio.gather(*(_trouble(settings, provider, model) for model in models or [""]))
    finally:
        await provider.aclose()
    if troubles := [trouble for trouble in dict.fromkeys(results) if trouble is not None]:
        return Finding(what, False, "; ".join(troubles))
    answers = f" and answers as {', '.join(models)}" if models else ""
    return Finding(what, True, f"{_shown(settings, name)} takes the key{answers}")


async def _trouble(settings: Settings, provider: Provider, model: str) -> str | None:
    name, shown = provider.name, _shown(settings, provider.name)
    try:
        async with asyncio.timeout(CALL_WITHIN_S):
            await provider.probe(model, by_call=bool(model))
    except TimeoutError:
        return f"{shown}: no answer within {CALL_WITHIN_S:g} s; see {_address_setting(settings, name)}"
    except (RateLimitedError, OverloadedError):
        return None  # the key is right, and the provider is only busy at the moment
    except AccountError as error:
        if error.type == "credentials":
            why = f"no credentials for {name}: {error_line(error.__cause__)}"
            return f"{why}; set {key_setting(name)}, or what the house's own library looks for"
        setting = key_setting(name) if error.status in (401, 402, 403) else _address_setting(settings, name)
        return f"{shown}: {error.reason} ({error.detail}): see {setting}"
    except RejectedError as error:
        if error.status == 403:
            return f"{shown} refuses {model!r} to this key ({error.detail}): see {key_setting(name)}"
        if error.status == 404:
            return f"{shown} has no model {model!r} ({error.detail}): see {_models_setting(name)}"
        return f"{shown} refuses a request for {model!r}: {error.detail}"
    except ProviderError as error:
        return f"{shown}: {error.detail}; see {_address_setting(settings, name)}"
    return None


def _shown(settings: Settings, name: str) -> str:
    if name == FIRST:
        return settings.provider
    section = settings.providers[name]
    if section.base_url is not None:
        return mask_url(section.base_url.get_secret_value())
    return f"{section.kind} in {section.region}"


def _models_setting(name: str) -> str:
    lanes = "LANEKEEPER_LANES__<LANE>__MODEL"
    return lanes if name == FIRST else f"{variable(('providers', name, 'models'))}, {lanes}"


def _address_setting(settings: Settings, name: str) -> str:
    if name == FIRST:
        return "ANTHROPIC_BASE_URL"
    return variable(("providers", name, "region" if settings.providers[name].base_url is None else "base_url"))


REPLY_WITHIN_S = 5.0
SINCE = (3, 12)
STAMP_SETTING = "message_interceptors.incoming.set_header_timestamp.overwrite = false"
WITHOUT = f"the wait and the deadline of a request without {SENT_MS} count from its first delivery"


async def replies(connection: Connection) -> list[Finding]:
    """Publishes a reply to a queue of its own, and takes it: the user's permissions, the broker's timestamps."""
    try:
        async with Inbox(connection) as inbox:
            message = Message(body=b"{}", message_id=uuid.uuid4().hex, persistent=False)
            await Publisher(connection, tracing=Tracing()).publish(
                message, exchange="", routing_key=inbox.name, traced=False, timeout_s=REPLY_WITHIN_S
            )
            async with asyncio.timeout(REPLY_WITHIN_S):
                received = await anext(inbox)
    except TimeoutError:
        return [
            Finding("permissions", False, f"a reply to a queue of its own did not come within {REPLY_WITHIN_S:g} s")
        ]
    except BrokerError as error:
        return [Finding("permissions", False, f"{error}; see the users in: lanekeeper topology export")]
    return [
        Finding("permissions", True, "replies can be sent and taken"),
        Finding("clock", True, _clock(connection.version, has_timestamp=BROKER_TIMESTAMP_MS in received.headers)),
    ]


def _clock(version: str, *, has_timestamp: bool) -> str:
    if has_timestamp:
        return f"the broker writes {BROKER_TIMESTAMP_MS}: waits and deadlines count from then"
    if is_before(version, SINCE):
        return f"{WITHOUT}: RabbitMQ {version} cannot tell when it came"
    return f"{WITHOUT}; recommended in rabbitmq.conf: {STAMP_SETTING}"


STORE_WITHIN_S: Final = 15.0
CONTENT: Final = b"lanekeeper check"
STORE_SETTING: Final = "LANEKEEPER_BODIES__URL"


async def bodies(settings: Settings) -> Finding:
    """Writes, reads and removes a body in the store for large ones."""
    store = settings.body_store()
    if store is None:
        return Finding(
            "bodies", None, f"there is no store for large bodies and answers ({STORE_SETTING}): they are refused"
        )
    doing = "written"
    try:
        async with asyncio.timeout(STORE_WITHIN_S):
            kept = await store.keep([CONTENT])
            doing = "read"
            await store.fetch(kept)
            doing = "removed"
            await store.drop(kept)
    except TimeoutError:
        cause = f"no answer within {STORE_WITHIN_S:g} s"
    except BodyError as error:
        cause = str(error)
    except BodiesUnavailable as error:
        cause = error.cause
    else:
        return Finding("bodies", True, f"{store.url} can be written, read and cleared")
    finally:
        store.close()
    mend = f"see that it is there, and that this process may write, read and remove files in it ({STORE_SETTING})"
    return Finding("bodies", False, f"{store.url}: a body cannot be {doing}: {cause}; {mend}")


SHOWN = 5
NOTE = 300


async def run_checks(settings: Settings, *, simulate: bool = False) -> AsyncIterator[Finding]:
    """All checks of `lanekeeper check`. `simulate`: providers are not called."""
    yield Finding("settings", True, f"namespace {settings.namespace}, lanes as set")
    why_no_provider = "not asked: answers are simulated" if simulate else None
    try:
        async with connection_for("check", settings) as connection:
            yield _broker(settings, connection)
            if (publisher := await _publisher(settings, connection)) is not None:
                yield publisher
                for what in ("topology", "providers", "store", "bodies"):
                    yield Finding(
                        what, None, "not looked at: it concerns who works lanes, and this user may only publish"
                    )
                return
            yield await _topology(settings, connection)
            for finding in await replies(connection):
                yield finding
            async for risk in risks(settings, connection):
                yield _told(settings, risk)
            if why_no_provider is None and await _is_simulated(settings, connection):
                why_no_provider = "not asked: the workers that run answer by a simulated one"
    except BrokerBlocked as error:  # whatever else is asked of it would only time out
        yield Finding("alarm", False, str(error))
    except BrokerError as error:
        yield Finding("broker", False, str(error))
        async for risk in risks(settings, None):
            yield _told(settings, risk)
    if why_no_provider is not None:
        yield Finding("providers", None, why_no_provider)
    else:
        for finding in await providers(settings):
            yield finding
    for finding in of_models(settings):
        yield finding
    yield await _store(settings)
    yield await bodies(settings)


async def _publisher(settings: Settings, connection: Connection) -> Finding | None:
    """For a user that may only publish: with which keys. None: it is a worker's user. Raises BrokerBlocked."""
    user, _ = settings.credentials
    names = settings.names()
    if await _may_write(connection, "", names.reply_prefix + "check"):
        return None
    keys = [f"{lane.name}.{user}" for lane in settings.lane_specs()]
    may = [key for key in keys if await _may_write(connection, names.requests, f"{key}.check")]
    if not may:
        return None
    return Finding("permissions", True, f"user {user} may publish, with keys {', '.join(f'{key}.…' for key in may)}")


async def _may_write(connection: Connection, exchange: str, key: str) -> bool:
    try:
        await check_write_rights(connection, [(exchange, key)])
    except BrokerError as error:
        if connection.blocked is not None:
            raise connection.blocked_error("publishers wait until it ends") from error
        return False
    return True


async def _is_simulated(settings: Settings, connection: Connection) -> bool:
    try:
        answers = await gather(connection, names=settings.names())
    except BrokerError:
        return False
    return bool(answers) and all(answer.get("simulated") for answer in answers)


def _broker(settings: Settings, connection: Connection) -> Finding:
    try:
        Broker(connection.version)
    except ValueError as error:
        return Finding("broker", False, str(error))
    return Finding("broker", True, f"RabbitMQ {connection.version} at {settings.broker}")


async def _topology(settings: Settings, connection: Connection) -> Finding:
    wanted = declare(settings.lane_specs(), names=settings.names(), broker_version=connection.version)
    try:
        management = await management_of(settings, connection)
        found = await verify(wanted, management, await connection.underlying())
        unread = await _unread(connection, found.differences, names=settings.names())
    except BrokerError as error:
        return Finding("topology", False, str(error))
    differences = found.differences
    if not differences:
        text = f"{len(wanted.exchanges)} exchanges and {len(wanted.queues)} queues are as declared"
        if found.note is not None:
            text += ", as far as seen: " + shorten(found.note, NOTE, placeholder=" …")
        return Finding("topology", True, text)
    named = "; ".join(difference.line for difference in differences[:SHOWN])
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    command = "apply" if found.missing else "plan"
    return Finding("topology", False, f"{unread}{named}{more}; run: lanekeeper topology {command}")


async def _unread(connection: Connection, differences: Sequence[Difference], *, names: Names) -> str:
    """What waits in queues of former lanes, if this user may see it: a worker need not. Raises BrokerError."""
    extra = {each.name for each in differences if each.change == "extra" and each.what == "queue"}
    lanes = {lane for name in extra if (lane := names.lane_behind(name)) is not None}
    queues = extra & {names.intake(lane) for lane in lanes} | {name for name in extra if names.lane_behind(name)}
    try:
        found = await depths(connection, sorted(queues)) if queues else {}
    except AccessRefused:
        return ""
    told = [f"{depth.ready} in {name}" for name, depth in found.items() if depth.ready]
    if not told:
        return ""
    return (
        f"messages wait in queues of a former lane, which nobody reads: {', '.join(told)}; switch the lane on again; "
    )


async def _store(settings: Settings) -> Finding:
    try:
        async with open_store(settings.store, namespace=settings.namespace, spec=settings.store_spec()) as store:
            await store.probe()
    except StoreUnavailable as error:
        return Finding("store", False, str(error))
    return Finding("store", True, f"{settings.shown_store} can be written")


# ---- what the production profile does not accept ---------------------------------------------------------------------

PLAIN = frozenset({"amqp", "http", "redis"})
"""The URL schemes of connections without encryption: anybody on the network can read what is sent (passwords, prompts,
answers)."""


async def refuse_risks(settings: Settings) -> None:
    """Raises a SettingsError that names all risks, with the profile `production`."""
    if not settings.is_production:
        return
    async with connection_for("check", settings) as broker:
        found = [risk async for risk in risks(settings, broker)]
    if found:
        lines = "".join(f"\n  {risk.what}: {risk.text}" for risk in found)
        raise SettingsError(f"not fit for production (LANEKEEPER_PROFILE), {len(found)} findings:{lines}")


def warn_of_plain_text(settings: Settings) -> None:
    """Logs each connection that goes to another machine without TLS."""
    for risk in of_transport(settings):
        log.warning(signals.PLAIN_TEXT, what=risk.what, reason=risk.text)


def of_models(settings: Settings) -> Iterator[Finding]:
    """The models that the settings name and that have no price: perhaps a new model, perhaps a slip of the pen."""
    prices = settings.prices.table()
    named = dict(settings.routes_spec().models())
    for lane in settings.lane_specs():
        named.setdefault(lane.model, lane.model)
    for model, name in sorted(named.items()):
        if not prices.has(model, name):
            near = get_close_matches(model, prices.models, n=1, cutoff=0.8)
            meant = f"; did you mean {near[0]}?" if near else ""
            text = f"has no price, so what it costs is not counted: set it in LANEKEEPER_PRICES__MODELS{meant}"
            yield Finding(f"model {model}", None, text)


def warn_of_unpriced(settings: Settings) -> None:
    """Logs each model that the settings name and that has no price."""
    for found in of_models(settings):
        log.warning(signals.MODEL_UNPRICED, model=found.what.removeprefix("model "), reason=found.text)


def _told(settings: Settings, risk: Finding) -> Finding:
    if settings.is_production:
        return replace(risk, well=False)
    return replace(risk, text=f"not for production: {risk.text}")


async def risks(settings: Settings, broker: Connection | None) -> AsyncIterator[Finding]:
    """All risks in production. `broker`: None if it is not reachable."""
    for risk in (*of_transport(settings), *of_settings(settings), *of_file(settings)):
        yield risk
    if broker is not None:
        async for risk in _of_broker(settings, broker):
            yield risk
    if not settings.store.startswith(SQLITE):
        for text in await redis_risks(settings.store, tls=settings.tls.for_redis()):
            yield Finding("store durability", None, text)


def of_transport(settings: Settings) -> Iterator[Finding]:
    """URLs that lead to another machine without TLS."""
    urls = [("broker TLS", "LANEKEEPER_AMQP_URL", "amqps://", url) for url in settings.broker_urls]
    if settings.management is not None:
        urls.append(("management TLS", "LANEKEEPER_MANAGEMENT_URL", "https://", settings.management))
    if (sentinels := SentinelUrl.of(settings.store)) is None:
        urls.append(("store TLS", "LANEKEEPER_STORE_URL", "rediss://", settings.store))
    elif not sentinels.is_encrypted:
        named = [f"redis://{host}" for host, _ in sentinels.hosts]
        urls += [("store TLS", "LANEKEEPER_STORE_URL", "rediss+sentinel://", url) for url in named]
    for provider in settings.routes_spec().providers:
        if provider.name == FIRST:
            urls.append(("provider TLS", "ANTHROPIC_BASE_URL", "https://", settings.provider_url))
        elif (base := settings.providers[provider.name].base_url) is not None:
            name = variable(("providers", provider.name, "base_url"))
            urls.append(("provider TLS", name, "https://", base.get_secret_value()))
    for what, setting, better, url in urls:
        if (host := _plain_to(url)) is not None and host not in settings.tls.plain_hosts:
            yield Finding(what, None, f"plain text to {host}, which is not this machine: set {setting} to {better}…")


def of_settings(settings: Settings) -> Iterator[Finding]:
    """What the settings themselves risk."""
    if "guest" in {urlsplit(url).username or "guest" for url in settings.broker_urls}:
        text = "guest, whose password everybody knows: lanekeeper topology export --user worker:worker"
        yield Finding("broker user", None, text)
    if not settings.needs_user_id:
        yield Finding(
            "user_id",
            None,
            "requests without user_id are taken, and share one tenant: whoever knows an id fetches or cancels it; "
            "set LANEKEEPER_REQUIRE_USER_ID=true",
        )
    if not settings.binds_replies:
        text = "a request may have its reply sent into any queue: set LANEKEEPER_REPLY_TO__BOUND_TO_USER=true"
        yield Finding("replies", None, text)
    if settings.log_content:
        yield Finding("log content", None, "the log may hold prompts and answers: leave LANEKEEPER_LOG_CONTENT out")
    if settings.failpoints:
        yield Finding("failpoints", None, "the worker dies on purpose: leave LANEKEEPER_FAILPOINTS out")
    if settings.webhooks.allow_private or settings.webhooks.allow_http:
        out = "LANEKEEPER_WEBHOOKS__ALLOW_PRIVATE and LANEKEEPER_WEBHOOKS__ALLOW_HTTP"
        yield Finding("webhooks", None, f"webhooks may call private addresses, or are not encrypted: leave {out} out")


def of_file(settings: Settings) -> Iterator[Finding]:
    """A SQLite file that other users of this machine may read."""
    if not settings.store.startswith(SQLITE):
        return
    path = Path(unquote(settings.store.removeprefix(SQLITE)))
    with suppress(OSError):
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            yield Finding("store file", None, f"{path} has mode {mode:04o}, and holds answers: chmod 600 {path}")


async def _of_broker(settings: Settings, broker: Connection) -> AsyncIterator[Finding]:
    if is_before(broker.version, RECOMMENDED):
        wanted = ".".join(map(str, RECOMMENDED))
        yield Finding(
            "broker version", None, f"RabbitMQ {broker.version} has known holes (docs/facts.md): {wanted} or later"
        )
    try:
        # A worker's user may not publish control messages; an administrator, a deployer or a user with all rights may.
        await check_write_rights(broker, [(settings.names().control, CANCEL_KEY)])
    except AccessRefused:
        return
    except BrokerBlocked as blocked:
        yield Finding("broker rights", None, f"they cannot be seen now: {blocked}")
    except BrokerError:
        return  # nothing is declared yet, which another check reports
    else:
        yield Finding(
            "broker rights",
            None,
            f"user {settings.credentials[0]} may publish control messages, and so may do more than a worker needs: "
            "lanekeeper topology export --user worker:worker, and lanekeeper consume",
        )


def _plain_to(url: str) -> str | None:
    parts = urlsplit(url)
    host = parts.hostname or "localhost"
    return host if parts.scheme in PLAIN and not is_loopback(host) else None
