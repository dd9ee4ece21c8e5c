"""The risks that the production profile does not accept. `lanekeeper check` and a starting worker check for the same
risks.

    await refuse(settings)                       raises SettingsError that names all risks
    async for risk in risks(settings, connection): …

docs/production.md describes every risk. Without the profile `production`, `lanekeeper check` reports the risks as
warnings, and a starting process logs unencrypted connections."""

import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from consumers.state import SQLITE, redis_risks
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import AccessRefused, BrokerBlocked, BrokerError, SettingsError
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.logs import logger
from service.config.loading import variable
from service.config.settings import FIRST, Settings
from service.gateway.access import is_loopback
from service.worker.assembly import connection_for
from topology.broker.admin import check_write_rights
from topology.declaration import RECOMMENDED, is_before

log = logger()
PLAIN = frozenset({"amqp", "http", "redis"})
"""The URL schemes of connections without encryption: anybody on the network can read what is sent (passwords, prompts,
answers)."""


@dataclass(frozen=True, slots=True)
class Risk:
    """One reason why the settings or the broker are not safe in production. docs/production.md has a row for each."""

    what: str
    text: str
    """What the risk is, and how to remove it."""


async def refuse(settings: Settings) -> None:
    """With the profile `production`, check for risks and raise a SettingsError that names all of them. With any other
    profile, do nothing."""
    if not settings.is_production:
        return
    async with connection_for("check", settings) as broker:
        found = [risk async for risk in risks(settings, broker)]
    if found:
        lines = "".join(f"\n  {risk.what}: {risk.text}" for risk in found)
        raise SettingsError(f"not fit for production (LANEKEEPER_PROFILE), {len(found)} findings:{lines}")


def warn_of_plain_text(settings: Settings) -> None:
    """Log a warning for each configured connection (broker, store, provider) that goes to another machine without
    TLS."""
    for risk in of_transport(settings):
        log.warning(signals.PLAIN_TEXT, what=risk.what, reason=risk.text)


async def risks(settings: Settings, broker: Connection | None) -> AsyncIterator[Risk]:
    """Find all risks in production: in the settings, the store and the broker. `broker`: a connection to the broker.
    None: the broker is not reachable, which another check reports."""
    for risk in (*of_transport(settings), *of_settings(settings), *of_file(settings)):
        yield risk
    if broker is not None:
        async for risk in _of_broker(settings, broker):
            yield risk
    if not settings.store.startswith(SQLITE):
        for text in await redis_risks(settings.store):
            yield Risk("store durability", text)


def of_transport(settings: Settings) -> Iterator[Risk]:
    """Yield a risk for each configured URL that leads to another machine without TLS."""
    urls = [("broker TLS", "LANEKEEPER_AMQP_URL", "amqps://", url) for url in settings.broker_urls]
    if settings.management is not None:
        urls.append(("management TLS", "LANEKEEPER_MANAGEMENT_URL", "https://", settings.management))
    urls.append(("store TLS", "LANEKEEPER_STORE_URL", "rediss://", settings.store))
    for provider in settings.routes_spec().providers:
        if provider.name == FIRST:
            urls.append(("provider TLS", "ANTHROPIC_BASE_URL", "https://", settings.provider_url))
        elif (base := settings.providers[provider.name].base_url) is not None:
            name = variable(("providers", provider.name, "base_url"))
            urls.append(("provider TLS", name, "https://", base.get_secret_value()))
    for what, setting, better, url in urls:
        if (host := _plain_to(url)) is not None and host not in settings.tls.plain_hosts:
            yield Risk(what, f"plain text to {host}, which is not this machine: set {setting} to {better}…")


def of_settings(settings: Settings) -> Iterator[Risk]:
    """The risks of the settings themselves, such as the AMQP user `guest`, or prompts in the log."""
    if "guest" in {urlsplit(url).username or "guest" for url in settings.broker_urls}:
        yield Risk(
            "broker user", "guest, whose password everybody knows: lanekeeper topology export --user worker:worker"
        )
    if not settings.needs_user_id:
        yield Risk(
            "user_id",
            "requests without user_id are taken, and share one tenant: whoever knows an id fetches or cancels it; "
            "set LANEKEEPER_REQUIRE_USER_ID=true",
        )
    if not settings.binds_replies:
        yield Risk(
            "replies", "a request may have its reply sent into any queue: set LANEKEEPER_REPLY_TO__BOUND_TO_USER=true"
        )
    if settings.log_content:
        yield Risk("log content", "the log may hold prompts and answers: leave LANEKEEPER_LOG_CONTENT out")
    if settings.failpoints:
        yield Risk("failpoints", "the worker dies on purpose: leave LANEKEEPER_FAILPOINTS out")


def of_file(settings: Settings) -> Iterator[Risk]:
    """The risk of a SQLite store whose file other users of this machine may read."""
    if not settings.store.startswith(SQLITE):
        return
    path = Path(unquote(settings.store.removeprefix(SQLITE)))
    with suppress(OSError):
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            yield Risk("store file", f"{path} has mode {mode:04o}, and holds answers: chmod 600 {path}")


async def _of_broker(settings: Settings, broker: Connection) -> AsyncIterator[Risk]:
    if is_before(broker.version, RECOMMENDED):
        wanted = ".".join(map(str, RECOMMENDED))
        yield Risk("broker version", f"RabbitMQ {broker.version} has known holes (docs/broker.md): {wanted} or later")
    try:
        # A worker's user may not publish requests; an administrator, a deployer or a user with all rights may.
        await check_write_rights(broker, [(settings.names().requests, f"{settings.lane_specs()[0].name}.a.b")])
    except AccessRefused:
        return
    except BrokerBlocked as blocked:
        yield Risk("broker rights", f"they cannot be seen now: {blocked}")
    except BrokerError:
        return  # nothing is declared yet, which another check reports
    else:
        yield Risk(
            "broker rights",
            f"user {settings.credentials[0]} may publish requests, and so may do more than a worker needs: "
            "lanekeeper topology export --user worker:worker, and lanekeeper consume",
        )


def _plain_to(url: str) -> str | None:
    """The host to which a URL leads without TLS; None if the URL uses TLS, or the host is this machine."""
    parts = urlsplit(url)
    host = parts.hostname or "localhost"
    return host if parts.scheme in PLAIN and not is_loopback(host) else None
