"""Exports a topology as RabbitMQ definitions, with users that have only the rights they need.

The definitions are imported by POST /api/definitions, `rabbitmqctl import_definitions FILE`, or `load_definitions =
FILE` in rabbitmq.conf.

| role | may |
|---|---|
| application | publish to `lane.requests` with keys `<its lanes>.<its name>.…`; read its reply queue |
| client | all that an application may; cancel requests and fetch results: publish to `lane.control` |
| worker | consume our queues; publish requests, delayed ones too, dead letters, events, replies; declare own queues |
| operator | publish to any lane; cancel; pause; see events; read, import, replay dead letters; see management |
| deployer | configure, write and read everything in our namespace: `topology apply` |

Applications and clients may declare nothing: a queue of theirs could dead-letter to `lane.requests` under any key,
because the broker checks topic permissions only when a message is published (docs/production.md).
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lanekeeper.contract.names import CONTROL_KEYS, Names
from topology.declaration import QUORUM, Arguments, Queue, Topology
from topology.lanes import MIB

Role = Literal["application", "client", "worker", "operator", "deployer"]

NOTHING = "^$"
OWN_QUEUES = r"amq\.gen-.*"
DEFAULT_EXCHANGE = r"amq\.default"
TAGS: dict[Role, str] = {"operator": "monitoring", "deployer": "management"}
APPLICATIONS: tuple[Role, ...] = ("application", "client")
HASHING = "rabbit_password_hashing_sha256"
SALT_BYTES = 4
NOT_EXPORTED = ("exclusive", "policy", "members")
CONTROL_MAX_MESSAGES = 5_000
CONTROL_MAX_BYTES = 16 * 1024 * 1024
"""With these limits a flood of control messages cannot fill the disk while no worker runs, and a worker needs only
seconds to process all of them. They are a policy, because the arguments of an existing queue cannot be changed."""
REPLIES_MAX_MESSAGES = 10_000
REPLIES_MAX_BYTES = 256 * MIB
REPLIES_KEPT_MS = 86_400_000
_USER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class User:
    """A user to create on the broker. `password_hash` comes from `hash_password`; there is no default password. Raises
    ValueError for a name that cannot be a single word of a routing key."""

    name: str
    role: Role
    password_hash: str = field(repr=False)
    lanes: tuple[str, ...] = ()
    """For an application or client."""
    connections: int = 200
    """For an application or client: each takes some 100 kB of the broker's memory. An operator can change the limits by
    `rabbitmqctl set_user_limits`; the next import of definitions sets them again."""
    channels: int = 2000

    def __post_init__(self) -> None:
        if not _USER_NAME.fullmatch(self.name):
            raise ValueError(f"user name {self.name!r}: allowed are 1 to 64 of A-Z a-z 0-9 _ -")


@dataclass(frozen=True, slots=True)
class Rights:
    """Regular expressions for the names that a user may configure, write to and read from."""

    configure: str
    write: str
    read: str


def hash_password(password: str, *, salt: bytes) -> str:
    """Hash a password as RabbitMQ does: base64 of a 4-byte salt, followed by the SHA-256 of salt and password. Raises
    ValueError for an empty password (with it, RabbitMQ lets nobody in) or a salt of another size."""
    if not password:
        raise ValueError("an empty password lets nobody in")
    if len(salt) != SALT_BYTES:
        raise ValueError(f"the salt has {len(salt)} bytes; RabbitMQ's has {SALT_BYTES}")
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def rights(user: User, topology: Topology) -> Rights:
    """The permissions that a user's role needs, and no more."""
    names = Names(topology.namespace)
    replies = rf"{re.escape(names.reply_queue(user.name))}(\..+)?"
    match user.role:
        case "application":
            return Rights(configure=NOTHING, write=_anchored(re.escape(names.requests)), read=_anchored(replies))
        case "client":
            may_write = _anchored(*map(re.escape, (names.requests, names.control)))
            return Rights(configure=NOTHING, write=may_write, read=_anchored(replies))
        case "worker":
            consumed = [queue for lane in topology.lanes for queue in (names.intake(lane), names.due(lane))]
            return Rights(
                configure=_anchored(OWN_QUEUES),
                write=_anchored(
                    rf"{re.escape(names.delay_prefix)}\d\d",
                    rf"{re.escape(names.side_prefix)}\d\d",
                    *map(re.escape, (names.requests, names.dead, names.webhooks, names.events)),
                    DEFAULT_EXCHANGE,
                    OWN_QUEUES,
                ),
                read=_anchored(
                    *map(re.escape, (*consumed, names.strays, names.dead, names.webhooks, names.control)),
                    *map(re.escape, (names.batches, names.tickets)),
                    rf"{re.escape(names.namespace)}\.({'|'.join(map(re.escape, topology.lanes))})\.side\.\d\d",
                    OWN_QUEUES,
                ),
            )
        case "operator":
            return Rights(
                configure=_anchored(OWN_QUEUES),
                write=_anchored(
                    *map(re.escape, (names.requests, names.dead, names.webhooks, names.control)), OWN_QUEUES
                ),
                read=_anchored(*map(re.escape, (names.dead, names.events)), OWN_QUEUES),
            )
        case "deployer":
            ours = f"^{re.escape(names.namespace)}\\."
            return Rights(configure=ours, write=ours, read=ours)


def definitions(topology: Topology, vhost: str, users: Sequence[User] = ()) -> dict[str, Any]:
    """The definitions of a topology and of `users`, in the JSON format that RabbitMQ imports."""
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
        "permissions": [{"user": user.name, "vhost": vhost, **asdict(rights(user, topology))} for user in users],
        "topic_permissions": [permission for user in users for permission in _topic_permissions(user, topology, vhost)],
        "policies": [_control_policy(topology, vhost)],
        "exchanges": [{"vhost": vhost, **asdict(exchange)} for exchange in topology.exchanges],
        "queues": [
            {"vhost": vhost, **{field: value for field, value in asdict(queue).items() if field not in NOT_EXPORTED}}
            for queue in (*topology.queues, *reply_queues(users, Names(topology.namespace)))
        ],
        "bindings": [
            {"vhost": vhost, "destination_type": fields.pop("destination_kind"), **fields}
            for fields in map(asdict, topology.bindings)
        ],
    }


def reply_queues(users: Sequence[User], names: Names) -> list[Queue]:
    """One for each application and client. Expired replies are dropped, not dead-lettered."""
    arguments: Arguments = {
        **QUORUM,
        "x-max-length": REPLIES_MAX_MESSAGES,
        "x-max-length-bytes": REPLIES_MAX_BYTES,
        "x-message-ttl": REPLIES_KEPT_MS,
        "x-overflow": "reject-publish",
    }
    return [Queue(names.reply_queue(user.name), arguments) for user in users if user.role in APPLICATIONS]


def _limits(user: User) -> dict[str, dict[str, int]]:
    if user.role not in APPLICATIONS:
        return {}
    return {"limits": {"max-connections": user.connections, "max-channels": user.channels}}


def _topic_permissions(user: User, topology: Topology, vhost: str) -> list[dict[str, str]]:
    names = Names(topology.namespace)
    is_requester = user.role in APPLICATIONS
    pattern_of: dict[str, str] = {}
    if is_requester or user.role == "operator":
        lanes = "|".join(map(re.escape, user.lanes if is_requester else topology.lanes))
        pattern_of[names.requests] = rf"^({lanes})\." + (r"{username}\." if is_requester else "")
    if user.role == "client":
        pattern_of[names.control] = _anchored(*map(re.escape, CONTROL_KEYS))
    return [
        {"user": user.name, "vhost": vhost, "exchange": exchange, "write": pattern, "read": NOTHING}
        for exchange, pattern in pattern_of.items()
    ]


def _control_policy(topology: Topology, vhost: str) -> dict[str, Any]:
    control = Names(topology.namespace).control
    return {
        "vhost": vhost,
        "name": f"{control} bound",
        "pattern": _anchored(re.escape(control)),
        "apply-to": "queues",
        "priority": 0,
        "definition": {
            "max-length": CONTROL_MAX_MESSAGES,
            "max-length-bytes": CONTROL_MAX_BYTES,
            "overflow": "reject-publish",
        },
    }


def _anchored(*patterns: str) -> str:
    """Anchored, because RabbitMQ otherwise accepts a match anywhere in the name."""
    return f"^({'|'.join(patterns)})$"
