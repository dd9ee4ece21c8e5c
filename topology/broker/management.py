"""A client for RabbitMQ's management HTTP API, to read the broker's cluster name and topology, and import definitions.

Credentials are sent only to the configured URL, or to a server at the AMQP host that answers like RabbitMQ's management
API; to the latter over TLS if the AMQP connection uses TLS. They are never sent to the target of a redirect.
"""

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
from aio_pika.abc import AbstractConnection
from yarl import URL

from lanekeeper.contract.identity import urls_of
from lanekeeper.contract.problems import AccessRefused, BrokerError, BrokerUnreachable
from topology.declaration import Arguments, Binding, Exchange, Queue, Topology, Value

TIMEOUT_S = 10
PORT = 15672
TLS_PORT = 15671
_REALM = "RabbitMQ"
_QUEUE_COLUMNS = "name,arguments,durable,auto_delete,exclusive,effective_policy_definition,members"


@dataclass(frozen=True, slots=True)
class Management:
    """The management API of one broker, for one virtual host. Each call makes and closes its own HTTP session.

    Every call raises BrokerUnreachable if nothing answers in time, AccessRefused for a user without the tag
    `management` or without rights in the virtual host, BrokerError for any other error.
    """

    url: str
    """Without credentials, so that error texts can quote it."""
    user: str
    password: str = field(repr=False)
    vhost: str
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)

    async def cluster_name(self) -> str:
        found = await self._get("overview")
        with self._read():
            return str(found["cluster_name"])

    async def topology(self) -> Topology:
        exchanges = await self._list(f"exchanges/{self._vhost}")
        queues = await self._list(f"queues/{self._vhost}", columns=_QUEUE_COLUMNS)
        bindings, nodes = await self.bindings(), await self._nodes()
        with self._read():
            return Topology(
                exchanges=tuple(
                    _exchange(found) for found in exchanges if found["name"] and not found["name"].startswith("amq.")
                ),
                queues=tuple(_queue(queue) for queue in queues),
                bindings=bindings,
                nodes=nodes,
            )

    async def bindings(self) -> tuple[Binding, ...]:
        found = await self._list(f"bindings/{self._vhost}")
        with self._read():
            return tuple(_binding(binding) for binding in found if binding["source"])

    async def messages(self) -> Mapping[str, int]:
        """How many messages each queue holds, with those that were delivered and are not acknowledged yet: as of some
        seconds ago."""
        found = await self._list(f"queues/{self._vhost}", columns="name,messages")
        with self._read():
            return {str(queue["name"]): int(queue.get("messages", 0)) for queue in found}

    async def import_definitions(self, definitions: dict[str, Any]) -> None:
        await self._call("POST", "definitions", body=definitions)

    async def _nodes(self) -> tuple[str, ...]:
        try:
            found = await self._list("nodes", columns="name")
        except AccessRefused:
            return ()
        with self._read():
            return tuple(sorted(node["name"] for node in found))

    @contextmanager
    def _read(self) -> Iterator[None]:
        """Around what reads an answer: whatever answers there may be no management API."""
        try:
            yield
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise BrokerError(f"{self.url} answered with something else than RabbitMQ's JSON") from error

    @property
    def _vhost(self) -> str:
        return quote(self.vhost, safe="")

    async def _list(self, path: str, **query: str) -> list[Any]:
        found = await self._get(path, **query)
        with self._read():
            if not isinstance(found, list):
                raise TypeError(type(found))
            return found

    async def _get(self, path: str, **query: str) -> Any:
        body = await self._call("GET", path, query=query)
        with self._read():
            return json.loads(body)

    async def _call(
        self, method: str, path: str, *, query: dict[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> bytes:
        # `encoded=True`, because the virtual host "/" must stay %2F in the path
        url = URL(f"{self.url.rstrip('/')}/api/{path}", encoded=True)
        try:
            login = aiohttp.encode_basic_auth(self.user, self.password)
        except ValueError as error:
            raise AccessRefused(f"no management API lets user {self.user!r} in: {error}") from error
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
                session.request(
                    method,
                    url,
                    params=query,
                    json=body,
                    headers={"authorization": login},
                    ssl=self.ssl_context or True,
                    allow_redirects=False,
                ) as answer,
            ):
                text = await answer.read()
                if answer.status >= 300:
                    raise self._refusal(answer.status, path, text)
                return text
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BrokerUnreachable(f"no management API at {self.url}: {error or type(error).__name__}") from error

    def _refusal(self, status: int, path: str, text: bytes) -> BrokerError:
        if status in (401, 403):
            return AccessRefused(
                f"the management API at {self.url} refuses user {self.user!r} ({status}): "
                f"it needs the tag `management` and rights in virtual host {self.vhost!r}"
            )
        if status == 404:
            return BrokerError(f"the management API at {self.url} knows no virtual host {self.vhost!r}")
        text_start = text[:200].decode("utf-8", errors="replace")
        return BrokerError(f"the management API at {self.url} answered {status} to {path}: {text_start}")


async def discover(
    amqp_url: str,
    management_url: str | None = None,
    *,
    connection: AbstractConnection | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> Management | None:
    """The management API of a broker: at `management_url`, unchecked, or at the AMQP hosts (port 15672, TLS: 15671).
    None if none answers there that accepts the user and belongs to the broker of `connection`."""
    for amqp in map(URL, urls_of(amqp_url)):
        user, password, vhost = amqp.user or "guest", amqp.password or "guest", amqp.path[1:] or "/"
        if management_url is not None:
            own = URL(management_url)
            if own.user is not None:
                user, password = own.user, own.password or ""
            return Management(str(own.with_user(None)), user, password, vhost, ssl_context)
        scheme, port = ("https", TLS_PORT) if amqp.scheme == "amqps" else ("http", PORT)
        url = URL.build(scheme=scheme, host=amqp.host or "localhost", port=port)
        if await _answers_as_rabbitmq(url, ssl_context):
            found = Management(str(url), user, password, vhost, ssl_context)
            with suppress(BrokerError):
                cluster_name = await found.cluster_name()
                if connection is None or is_same_broker(cluster_name, connection):
                    return found
    return None


def is_same_broker(cluster_name: str, connection: AbstractConnection) -> bool:
    """Whether a management API's cluster name is that of `connection`'s broker."""
    if connection.transport is None:
        raise BrokerUnreachable("the connection was closed meanwhile")
    properties = connection.transport.connection.server_properties
    return str(properties.get("cluster_name", cluster_name)) == cluster_name


async def _answers_as_rabbitmq(url: URL, ssl_context: ssl.SSLContext | None) -> bool:
    """Whether the server asks for a login as RabbitMQ's management API does. No credentials are sent, because another
    service may listen on this port."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session,
            session.get(url / "api" / "overview", ssl=ssl_context or True, allow_redirects=False) as answer,
        ):
            return answer.status == 401 and _REALM in answer.headers.get("www-authenticate", "")
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _exchange(found: dict[str, Any]) -> Exchange:
    same = ("name", "type", "internal", "durable", "auto_delete")
    return Exchange(**{field: found[field] for field in same}, arguments=_arguments(found["arguments"]))


def _queue(found: dict[str, Any]) -> Queue:
    return Queue(
        **{field: found[field] for field in ("name", "durable", "auto_delete")},
        arguments=_arguments(found["arguments"]),
        exclusive=bool(found.get("exclusive", False)),
        policy=_arguments(found.get("effective_policy_definition")),
        members=tuple(found.get("members", ())),
    )


def _binding(found: dict[str, Any]) -> Binding:
    return Binding(
        **{field: found[field] for field in ("source", "destination", "routing_key")},
        destination_kind=found["destination_type"],
        arguments=_arguments(found["arguments"]),
    )


def _arguments(found: object) -> Arguments:
    """Some RabbitMQ versions send an empty table as `[]`. Nested values become JSON text."""
    if not isinstance(found, dict):
        return {}
    return {
        key: value if isinstance(value, Value) else json.dumps(value, sort_keys=True) for key, value in found.items()
    }
