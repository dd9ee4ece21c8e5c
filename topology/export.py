"""RabbitMQ definitions of a topology, with users that have only the rights they need.

    POST /api/definitions, `rabbitmqctl import_definitions FILE`, or `load_definitions = FILE` in rabbitmq.conf

| role | may |
|---|---|
| application | publish to `lane.requests` with keys `<its lanes>.<its name>.…`; read its reply queue |
| client | the same, and cancel its requests and fetch their results: publish to `lane.control` |
| worker | read lanes, fallen and dead letters; write delays, side queues, dead letters, events, replies; make queues |
| operator | publish to any lane, cancel, watch events by its own queue, read `lane.dead`; see all in the UI |
| deployer | configure, write and read everything of ours: `topology apply` |

Applications and clients may declare nothing. A user that may declare a queue, even one that the broker names, could
make it dead-letter to `lane.requests` under any key: the broker checks topic permissions when a message is published,
and not when it is dead-lettered. They get replies by direct reply-to, which needs no right, or from
`lane.reply.<user>`, a durable queue that is declared for them here.

Workers and operators may declare queues that the broker names (`amq.gen-…`). They may publish into every lane anyway. A
client cannot choose such a name, so this right allows no exchange. An operator watches events with such a queue, and
could make it dead-letter to `lane.requests` under any key: operators are trusted.

A user that may write `lane.control` gets answers about requests of its own tenant (`user_id`) only. Requests without a
tenant belong to everybody who knows their id: do not give the `client` role to untrusted applications.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lanekeeper.contract.names import CONTROL_KEYS, Names
from topology.lanes import BATCH, MIB, NORMAL
from topology.model import Arguments, Queue, Topology

Role = Literal["application", "client", "worker", "operator", "deployer"]

NOTHING = "^$"
OWN_QUEUES = r"amq\.gen-.*"
"""Queues that the broker named."""
DEFAULT_EXCHANGE = r"amq\.default"
TAGS: dict[Role, str] = {"operator": "monitoring", "deployer": "management"}
APPLICATIONS: tuple[Role, ...] = ("application", "client")
HASHING = "rabbit_password_hashing_sha256"
SALT_BYTES = 4
FOUND_ALONE = ("exclusive", "policy", "members")
"""Properties of a queue that definitions do not contain."""
CONTROL_AT_MOST = 5_000
CONTROL_BYTES = 16 * 1024 * 1024
"""How much may wait in `lane.control` before its publishers are refused. So a flood cannot fill the disk while no
worker runs, and later messages are reached within seconds. It is a policy, because arguments of an existing queue
cannot change."""
REPLIES_AT_MOST = 10_000
REPLY_BYTES_AT_MOST = 256 * MIB
"""The limit of a reply queue that its application does not read. Further replies are refused and stay in the store."""
REPLIES_KEPT_MS = 86_400_000
"""How long a reply stays in a reply queue: as long as results are kept by default."""
_USER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class User:
    """A user of the broker. Raises ValueError for a name that is more than one word of a routing key.

    `password_hash` comes from `hash_password`: there is no default password, and none is made here.
    """

    name: str
    role: Role
    password_hash: str = field(repr=False)
    lanes: tuple[str, ...] = (NORMAL.name, BATCH.name)
    """The lanes that an application or client may publish into. Critical has to be granted explicitly."""
    connections: int = 200
    """The most connections of an application or client at the same time; each takes some 100 kB of the broker's memory.
    `rabbitmqctl set_user_limits` changes it, until definitions are imported again."""
    channels: int = 2000

    def __post_init__(self) -> None:
        # The broker puts the user's name into a regular expression, and it is one word of a routing key.
        if not _USER_NAME.fullmatch(self.name):
            raise ValueError(f"user name {self.name!r}: allowed are 1 to 64 of A-Z a-z 0-9 _ -")


@dataclass(frozen=True, slots=True)
class Rights:
    """Regular expressions of what a user may configure, write to and read from."""

    configure: str
    write: str
    read: str


def hash_password(password: str, *, salt: bytes) -> str:
    """Hash as RabbitMQ stores it: base64 of a 4-byte salt and SHA-256 over salt and password.

    Raises ValueError for an empty password (with it, RabbitMQ lets nobody in) or a salt of another size.
    """
    if not password:
        raise ValueError("an empty password lets nobody in")
    if len(salt) != SALT_BYTES:
        raise ValueError(f"the salt has {len(salt)} bytes; RabbitMQ's has {SALT_BYTES}")
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def rights(user: User, topology: Topology) -> Rights:
    """What a user may do; the names are those of the topology."""
    names = Names(topology.namespace)
    replies = rf"{re.escape(names.reply_queue(user.name))}(\..+)?"
    match user.role:
        case "application":
            return Rights(NOTHING, _any(re.escape(names.requests)), _any(replies))
        case "client":
            return Rights(NOTHING, _any(*map(re.escape, (names.requests, names.control))), _any(replies))
        case "worker":
            return Rights(
                _any(OWN_QUEUES),
                _any(
                    rf"{re.escape(names.delay_prefix)}\d\d",
                    rf"{re.escape(names.side_prefix)}\d\d",
                    *map(re.escape, (names.dead, names.events)),
                    DEFAULT_EXCHANGE,
                    OWN_QUEUES,
                ),
                _any(
                    *map(re.escape, (*_lane_queues(topology), names.fallen, names.dead, names.control)),
                    rf"{re.escape(names.namespace)}\.({'|'.join(map(re.escape, topology.lanes))})\.side\.\d\d",
                    OWN_QUEUES,
                ),
            )
        case "operator":
            return Rights(
                _any(OWN_QUEUES),
                _any(*map(re.escape, (names.requests, names.control)), OWN_QUEUES),
                _any(*map(re.escape, (names.dead, names.events)), OWN_QUEUES),
            )
        case "deployer":
            ours = f"^{re.escape(names.namespace)}\\."
            return Rights(ours, ours, ours)


def definitions(topology: Topology, vhost: str, users: Sequence[User] = ()) -> dict[str, Any]:
    """RabbitMQ's definitions as JSON values. Without users there are no permissions either."""
    return {
        "vhosts": [{"name": vhost}],
        "users": [
            {
                "name": user.name,
                "password_hash": user.password_hash,
                "hashing_algorithm": HASHING,
                "tags": TAGS.get(user.role, ""),
                **_limits(user),
            }
            for user in users
        ],
        "permissions": [_permission(user, topology, vhost) for user in users],
        "topic_permissions": [permission for user in users for permission in _topic_permissions(user, topology, vhost)],
        "policies": [_control_policy(topology, vhost)],
        "exchanges": [{"vhost": vhost, **asdict(exchange)} for exchange in topology.exchanges],
        "queues": [
            {"vhost": vhost, **{field: value for field, value in asdict(queue).items() if field not in FOUND_ALONE}}
            for queue in (*topology.queues, *reply_queues(users, Names(topology.namespace)))
        ],
        "bindings": [
            {"vhost": vhost, "destination_type": fields.pop("destination_kind"), **fields}
            for fields in map(asdict, topology.bindings)
        ],
    }


def reply_queues(users: Sequence[User], names: Names) -> list[Queue]:
    """A queue for the replies of each application. It has a limit, refuses replies when full, and dead-letters
    nothing."""
    arguments: Arguments = {
        "x-queue-type": "quorum",
        "x-queue-leader-locator": "balanced",
        "x-max-length": REPLIES_AT_MOST,
        "x-max-length-bytes": REPLY_BYTES_AT_MOST,
        "x-message-ttl": REPLIES_KEPT_MS,
        "x-overflow": "reject-publish",
    }
    return [Queue(names.reply_queue(user.name), arguments) for user in users if user.role in APPLICATIONS]


def _limits(user: User) -> dict[str, dict[str, int]]:
    """Connection limits for applications and clients only: a worker that is refused a connection could not work."""
    if user.role not in APPLICATIONS:
        return {}
    return {"limits": {"max-connections": user.connections, "max-channels": user.channels}}


def _permission(user: User, topology: Topology, vhost: str) -> dict[str, str]:
    return {"user": user.name, "vhost": vhost, **asdict(rights(user, topology))}


def _topic_permissions(user: User, topology: Topology, vhost: str) -> list[dict[str, str]]:
    """Which keys a user may publish with, by exchange. For an exchange without an entry, RabbitMQ allows every key."""
    names = Names(topology.namespace)
    asks = user.role in APPLICATIONS
    written: dict[str, str] = {}
    if asks or user.role == "operator":
        lanes = "|".join(map(re.escape, user.lanes if asks else topology.lanes))
        written[names.requests] = rf"^({lanes})\." + (r"{username}\." if asks else "")
    if user.role == "client":
        written[names.control] = _any(*map(re.escape, CONTROL_KEYS))
    return [
        {"user": user.name, "vhost": vhost, "exchange": exchange, "write": pattern, "read": NOTHING}
        for exchange, pattern in written.items()
    ]


def _control_policy(topology: Topology, vhost: str) -> dict[str, Any]:
    control = Names(topology.namespace).control
    return {
        "vhost": vhost,
        "name": f"{control} bound",
        "pattern": _any(re.escape(control)),
        "apply-to": "queues",
        "priority": 0,
        "definition": {
            "max-length": CONTROL_AT_MOST,
            "max-length-bytes": CONTROL_BYTES,
            "overflow": "reject-publish",
        },
    }


def _any(*patterns: str) -> str:
    """One expression, anchored at both ends: RabbitMQ's would match anywhere in the name otherwise."""
    return f"^({'|'.join(patterns)})$"


def _lane_queues(topology: Topology) -> list[str]:
    names = Names(topology.namespace)
    return [queue for lane in topology.lanes for queue in (names.intake(lane), names.due(lane))]
