"""Brokers for tests, a virtual host for each test, and what an administrator does to them."""

import asyncio
import base64
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import pytest
from aio_pika.abc import AbstractConnection

from tests.support.waiting import STARTED_S, until

TIMEOUT_S = 30
MANAGEMENT_PORT = 15672


@dataclass(frozen=True, slots=True)
class RunningBroker:
    amqp_url: str = field(repr=False)
    management_url: str
    version: str

    @classmethod
    def at(cls, amqp_url: str, management_url: str | None) -> "RunningBroker":
        """The broker at these addresses. Without `management_url`: port 15672 on the host of `amqp_url`."""
        found = management_url or f"http://{urlsplit(amqp_url).hostname}:{MANAGEMENT_PORT}"
        overview = _call(amqp_url, found, "GET", "overview")
        return cls(amqp_url, found.rstrip("/"), overview["rabbitmq_version"])


@dataclass(frozen=True, slots=True)
class Vhost:
    name: str
    amqp_url: str = field(repr=False)
    management_url: str
    version: str
    """The broker's version, as it reports it ("4.3.6")."""

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Call the management API: `vhost.api("GET", f"queues/{vhost.quoted}/lane.dead")`. JSON in, JSON out."""
        return _call(self.amqp_url, self.management_url, method, path, body)

    @property
    def quoted(self) -> str:
        return quote(self.name, safe="")

    @property
    def user(self) -> str:
        return unquote(urlsplit(self.amqp_url).username or "guest")

    @property
    def password(self) -> str:
        return unquote(urlsplit(self.amqp_url).password or "guest")


class At(Protocol):
    """A broker, or a virtual host on one."""

    @property
    def amqp_url(self) -> str: ...


def url_of(broker: str | At) -> str:
    return broker if isinstance(broker, str) else broker.amqp_url


@contextmanager
def fresh_vhost(broker: RunningBroker) -> Iterator[Vhost]:
    """A new virtual host on which the broker's user has all permissions; deleted afterwards with all its contents."""
    name = f"test-{secrets.token_hex(6)}"
    parts = urlsplit(broker.amqp_url)
    url = urlunsplit((parts.scheme, parts.netloc, f"/{quote(name, safe='')}", parts.query, ""))
    vhost = Vhost(name, url, broker.management_url, broker.version)
    try:
        vhost.api("PUT", f"vhosts/{vhost.quoted}")
        every = {"configure": ".*", "write": ".*", "read": ".*"}
        vhost.api("PUT", f"permissions/{vhost.quoted}/{quote(vhost.user, safe='')}", every)
        yield vhost
    finally:
        vhost.api("DELETE", f"vhosts/{vhost.quoted}")


def _call(amqp_url: str, management_url: str, method: str, path: str, body: object = None) -> Any:
    parts = urlsplit(amqp_url)
    credentials = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
    request = urllib.request.Request(
        f"{management_url.rstrip('/')}/api/{path}",
        method=method,
        data=json.dumps(body).encode() if body is not None else None,
        headers={
            "Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}",
            "Content-Type": "application/json",
        },
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode(errors='replace')}") from error
    return json.loads(text) if text else None


def version_of(connection: AbstractConnection) -> str:
    assert connection.transport is not None
    return str(connection.transport.connection.server_properties["version"])


async def close_connection(vhost: Vhost, name: str) -> None:
    found: list[str] = []

    async def is_listed() -> bool:
        every = await asyncio.to_thread(vhost.api, "GET", f"vhosts/{vhost.quoted}/connections")
        found[:] = [each["name"] for each in every if each.get("client_properties", {}).get("connection_name") == name]
        return bool(found)

    await until(is_listed, within_s=STARTED_S)  # it may be that of a process that starts
    for each in found:
        await asyncio.to_thread(vhost.api, "DELETE", f"connections/{quote(each, safe='')}")


NORMAL = "0.6"
NOTHING = "0.00001"


@asynccontextmanager
async def memory_alarm(amqp_url: str) -> AsyncIterator[None]:
    """Raise a memory alarm for as long as the block lasts. It affects all publishers, so the broker should be the
    test's own."""
    container = await _container(amqp_url)
    await _set_watermark(container, NOTHING)
    try:
        yield
    finally:
        await _set_watermark(container, NORMAL)


async def _container(amqp_url: str) -> str:
    try:
        found = await _output("docker", "ps", f"--filter=publish={urlsplit(amqp_url).port}", "--format={{.ID}}")
    except FileNotFoundError:
        found = ""
    if not found:
        pytest.skip("the broker is not in a container, where its alarms could be set off")
    return found


async def _set_watermark(container: str, watermark: str) -> None:
    await _output("docker", "exec", container, "rabbitmqctl", "--quiet", "set_vm_memory_high_watermark", watermark)


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0, command
    return said.decode().strip()
