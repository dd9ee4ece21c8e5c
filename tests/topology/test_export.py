"""Exported definitions: each role may do what it needs and nothing else."""

import base64
import hashlib
import json
import re

import pytest

from lanekeeper.contract.names import Names
from topology.declaration import declare
from topology.export import Role, User, definitions, hash_password, rights
from topology.lanes import DEFAULT_LANES

TOPOLOGY = declare(DEFAULT_LANES, names=Names(), broker_version="4.3.6")
HASH = hash_password("correct horse", salt=b"salt")


def test_a_password_is_hashed_as_rabbitmq_does() -> None:
    # The example in RabbitMQ's documentation ("Passwords": salt 908D C60A, password test12).
    assert hash_password("test12", salt=bytes.fromhex("908DC60A")) == "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"
    raw = base64.b64decode(HASH)
    assert raw == b"salt" + hashlib.sha256(b"saltcorrect horse").digest()


@pytest.mark.parametrize(("password", "salt"), [("", b"salt"), ("secret", b""), ("secret", b"12345")])
def test_an_empty_or_malformed_password_hash_is_refused(password: str, salt: bytes) -> None:
    with pytest.raises(ValueError, match=r"password|salt"):
        hash_password(password, salt=salt)


@pytest.mark.parametrize("name", ["", "a.b", "a*", "(x|y)", "ä", "a b", "x" * 65])
def test_a_user_name_must_be_usable_as_one_word_of_a_routing_key(name: str) -> None:
    with pytest.raises(ValueError, match="user name"):
        User(name, "application", HASH)


def test_a_password_hash_is_not_in_the_repr() -> None:
    assert HASH not in repr(User("support", "application", HASH))


REPLIES = "lane.reply.me lane.reply.me.two"
OURS = (
    "lane.requests lane.due lane.events lane.dead lane.fallen lane.control lane.critical lane.batch.due lane.delay.00 "
    "lane.delay.28 "
    f"lane.delay.xx lane.delay.00.x lane.critical.dueX lane.reply.men lane.reply.you lane.reply. {REPLIES}"
)
EVERY = f"{OURS} amq.gen-x amq.default laneXdead xlane.critical laneway orders mine"
MAY: dict[Role, tuple[str, str, str]] = {  # configure, write, read
    "application": ("", "lane.requests", REPLIES),
    "client": ("", "lane.requests lane.control", REPLIES),
    "worker": (
        "amq.gen-x",
        "lane.requests lane.delay.00 lane.delay.28 lane.dead lane.events amq.default amq.gen-x",
        "lane.critical lane.batch.due lane.fallen lane.dead lane.control amq.gen-x",
    ),
    "operator": ("amq.gen-x", "lane.requests lane.dead lane.control amq.gen-x", "lane.dead lane.events amq.gen-x"),
    "deployer": (OURS, OURS, OURS),
}


@pytest.mark.parametrize("role", MAY)
def test_a_role_may_do_what_it_needs_and_no_more(role: Role) -> None:
    given = rights(User("me", role, HASH), TOPOLOGY)
    for right, allowed in zip(("configure", "write", "read"), MAY[role], strict=True):
        pattern = re.compile(getattr(given, right))
        assert {name for name in EVERY.split() if pattern.search(name)} == set(allowed.split()), right


KEYS = (
    "normal.support.chat batch.support.chat critical.support.chat normal.other.chat normal.support "
    "xnormal.support.chat normalXsupport.a critical.pager.alert normal.pager.alert batch.crm.x nowhere.support.chat"
)


@pytest.mark.parametrize(
    ("user", "allowed"),
    [
        (User("support", "application", HASH, lanes=("normal", "batch")), "normal.support.chat batch.support.chat"),
        (User("pager", "application", HASH, lanes=("critical",)), "critical.pager.alert"),
        (User("olga", "operator", HASH), KEYS.replace("xnormal.support.chat normalXsupport.a ", "").rpartition(" ")[0]),
    ],
)
def test_the_routing_keys_that_a_user_may_publish_with(user: User, allowed: str) -> None:
    (permission,) = definitions(TOPOLOGY, "/", [user])["topic_permissions"]
    pattern = re.compile(permission["write"].replace("{username}", user.name))

    assert permission["exchange"] == "lane.requests"
    assert {key for key in KEYS.split() if pattern.search(key)} == set(allowed.split())


def test_definitions_are_json_and_contain_every_object_once() -> None:
    users = [User("app", "application", HASH), User("work", "worker", HASH), User("deploy", "deployer", HASH)]

    exported = json.loads(json.dumps(definitions(TOPOLOGY, "prod", users)))

    assert exported["vhosts"] == [{"name": "prod"}]
    assert [each["name"] for each in exported["queues"]] == [*(each.name for each in TOPOLOGY.queues), "lane.reply.app"]
    assert len(exported["exchanges"]) == len(TOPOLOGY.exchanges)
    assert len(exported["bindings"]) == len(TOPOLOGY.bindings)
    assert [each["user"] for each in exported["permissions"]] == ["app", "work", "deploy"]
    assert [each["user"] for each in exported["topic_permissions"]] == ["app"]
    assert {
        each["vhost"] for kind in ("queues", "exchanges", "bindings", "permissions") for each in exported[kind]
    } == {"prod"}


@pytest.mark.parametrize(
    ("role", "tags", "is_limited"),
    [
        ("application", "", True),
        ("client", "", True),
        ("worker", "", False),
        ("operator", "monitoring", False),
        ("deployer", "management", False),
    ],
)
def test_a_user_has_the_tags_of_its_role_and_a_requester_has_limits(role: Role, tags: str, is_limited: bool) -> None:
    (user,) = definitions(TOPOLOGY, "/", [User("me", role, HASH)])["users"]

    assert (user["tags"], user["hashing_algorithm"]) == (tags, "rabbit_password_hashing_sha256")
    assert user.get("limits") == ({"max-connections": 200, "max-channels": 2000} if is_limited else None)


def test_a_client_may_publish_the_control_messages_of_requesters_alone() -> None:
    users = [User("c", "client", HASH, lanes=("normal",)), User("w", "worker", HASH)]
    requests, control = definitions(TOPOLOGY, "/", users)["topic_permissions"]

    assert (requests["exchange"], requests["write"], requests["read"]) == (
        "lane.requests", r"^(normal)\.{username}\.", "^$"
    )  # fmt: skip
    assert (control["exchange"], control["write"]) == ("lane.control", "^(cancel|result|change)$")
    assert User("x" * 64, "worker", HASH)


def test_the_control_queue_refuses_publishers_when_it_is_full() -> None:
    (policy,) = definitions(TOPOLOGY, "prod")["policies"]

    assert (policy["vhost"], policy["pattern"], policy["apply-to"]) == ("prod", r"^(lane\.control)$", "queues")
    assert policy["definition"]["overflow"] == "reject-publish"
    assert (policy["definition"]["max-length"], policy["definition"]["max-length-bytes"]) == (5_000, 16_777_216)
    assert policy["priority"] == 0, "any policy of the operator's goes before it"


def test_a_reply_queue_is_limited_refuses_when_full_and_does_not_dead_letter() -> None:
    (queue,) = definitions(TOPOLOGY, "/", [User("app", "client", HASH)])["queues"][len(TOPOLOGY.queues) :]

    assert queue["durable"]
    assert queue["arguments"]["x-overflow"] == "reject-publish"
    assert queue["arguments"]["x-max-length"] == 10_000
    assert queue["arguments"]["x-max-length-bytes"] == 268_435_456
    assert queue["arguments"]["x-message-ttl"] == 86_400_000, "a day"
    assert not any("dead-letter" in argument for argument in queue["arguments"])
