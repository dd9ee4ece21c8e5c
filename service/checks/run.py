"""The checks of `lanekeeper check`. If something is wrong, the result of the check says what it is and how to correct
it."""

from collections.abc import AsyncIterator
from textwrap import shorten

from consumers.state.base import StoreUnavailable
from consumers.state.opening import open_store
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import BrokerError
from service.checks.bodies import bodies
from service.checks.production import risks
from service.checks.providers import Finding, providers
from service.checks.replies import replies
from service.checks.status import gather
from service.config.settings import Settings
from service.worker.broker import connection_for, management_of
from topology.broker.admin.rights import check_write_rights
from topology.broker.admin.verify import verify
from topology.declaration import Broker, declare

SHOWN = 5
"""The maximum number of queues, exchanges and bindings that `lanekeeper check` names as missing or different on the
broker."""
NOTE = 300
"""The maximum length, in characters, of the note in which `lanekeeper check` says what it could not compare on the
broker."""


async def look(settings: Settings, *, simulate: bool = False) -> AsyncIterator[Finding]:
    """Run all checks of `lanekeeper check`, and yield each result as soon as it is known. `simulate`: do not call
    providers."""
    yield Finding("settings", True, f"namespace {settings.namespace}, lanes as set")
    why_no_provider = "not asked: answers are simulated" if simulate else None
    connection = connection_for("check", settings)
    try:
        await connection.__aenter__()
    except BrokerError as error:
        yield Finding("broker", False, str(error))
        async for finding in _risks(settings, None):
            yield finding
    else:
        try:
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
            async for finding in _risks(settings, connection):
                yield finding
            if why_no_provider is None and await _is_simulated(settings, connection):
                why_no_provider = "not asked: the workers that run answer by a simulated one"
        finally:
            await connection.__aexit__(None, None, None)
    if why_no_provider is not None:
        yield Finding("providers", None, why_no_provider)
    else:
        for finding in await providers(settings):
            yield finding
    yield await _store(settings)
    yield await bodies(settings)


async def _risks(settings: Settings, connection: Connection | None) -> AsyncIterator[Finding]:
    """Check for risks in production (`production.py`), and yield a result for each. A risk is a failure with the
    profile `production`, and a warning without it."""
    async for risk in risks(settings, connection):
        if settings.is_production:
            yield Finding(risk.what, False, risk.text)
        else:
            yield Finding(risk.what, None, f"not for production: {risk.text}")


async def _publisher(settings: Settings, connection: Connection) -> Finding | None:
    """The result of `lanekeeper check` for an AMQP user that may only publish, as the user of an application may; it
    names the routing keys that this user may use. Returns None for a worker's user, which is recognised by its right to
    write to reply queues, and for a user that may not publish to any lane."""
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
    except BrokerError:
        return False
    return True


async def _is_simulated(settings: Settings, connection: Connection) -> bool:
    """Ask the running workers whether they use a simulated provider. False if none runs, or if one uses a real
    provider."""
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
    return Finding("topology", False, f"{named}{more}; run: lanekeeper topology {command}")


async def _store(settings: Settings) -> Finding:
    """Check that the store can be opened and written. A missing SQLite file is created, as a worker would do."""
    try:
        async with open_store(settings.store, namespace=settings.namespace, spec=settings.store_spec()) as store:
            await store.probe()
    except StoreUnavailable as error:
        return Finding("store", False, str(error))
    return Finding("store", True, f"{settings.shown_store} can be written")
