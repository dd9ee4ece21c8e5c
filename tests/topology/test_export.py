"""Exported definitions: each role may do what it needs and nothing else."""

import base64
import hashlib
import json

import pytest

from lanekeeper.contract.names import Names
from topology.declaration import declare
from topology.export import Role, User, definitions, hash_password
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
