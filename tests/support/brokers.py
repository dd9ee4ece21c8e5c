"""Brokers for tests, and a virtual host for each test."""

import base64
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from aio_pika.abc import AbstractConnection

TIMEOUT_S = 30
MANAGEMENT_PORT = 15672


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker that tests share. Its user may create virtual hosts."""

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
    """A virtual host that belongs to one test."""

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
        """The name as quoted in paths of the management API."""
        return quote(self.name, safe="")

    @property
    def user(self) -> str:
        return unquote(urlsplit(self.amqp_url).username or "guest")

    @property
    def password(self) -> str:
        return unquote(urlsplit(self.amqp_url).password or "guest")


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
    """The broker's version, as it reports it."""
    assert connection.transport is not None
    return str(connection.transport.connection.server_properties["version"])
