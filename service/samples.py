"""What parts of any process tell of themselves as metrics (`metrics.py`)."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.telemetry.figures import Histogram, Timings

Labels = Mapping[str, str]
Sample = tuple[str, Labels, float | Histogram]
"""A metric's name, labels and value."""
Source = Callable[[], Iterable[Sample]]


def of_connection(name: str, connection: Connection) -> Iterator[Sample]:
    """The samples of a connection to the broker."""
    labels = {"connection": name}
    yield "lanekeeper.broker.connected", labels, int(connection.is_open)
    yield "lanekeeper.broker.reconnects", labels, max(0, connection.openings - 1)
    yield "lanekeeper.broker.blocked", labels, int(connection.blocked is not None)
    yield "lanekeeper.broker.blocks", labels, connection.blocks


def of_http(times: Mapping[tuple[str, str, int], Histogram], *, is_ready: bool) -> Iterator[Sample]:
    """The samples of an HTTP server: its times by method, path and status."""
    yield "lanekeeper.ready", {}, int(is_ready)
    for (method, path, status), histogram in times.items():
        labels = {"http.request.method": method, "http.route": path, "http.response.status_code": str(status)}
        yield "http.server.request.duration", labels, histogram


def of_client(client: Client) -> Iterator[Sample]:
    """The samples of a gateway's client."""
    if client.amqp is not None:
        yield from of_connection("gateway", client.amqp.connection)
        yield from of_publishes(client.amqp.publisher.times)


def of_publishes(times: Timings) -> Iterator[Sample]:
    """The samples of a publisher."""
    for error_type, histogram in times.items():
        labels = {"messaging.system": "rabbitmq", "messaging.operation.name": "send"}
        failed = {"error.type": error_type} if error_type else {}
        yield "messaging.client.operation.duration", {**labels, **failed}, histogram


def of_store(times: Timings, *, url: str, trouble: str | None) -> Iterator[Sample]:
    """The samples of a store."""
    system = "sqlite" if url.startswith("sqlite") else "redis"
    yield "lanekeeper.store.available", {}, int(trouble is None)
    for operation, histogram in times.items():
        labels = {"db.system.name": system, "db.operation.name": operation}
        yield "db.client.operation.duration", labels, histogram
