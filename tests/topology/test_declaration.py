"""The topology that is declared, by version of the broker."""

import pytest

from lanekeeper.contract.names import Names
from topology.declaration import Broker, Exchange, Queue, Topology, declare
from topology.lanes import DEFAULT_LANES

VERSIONS = ("4.3.6", "4.0.5", "3.10.8")


def declared(version: str, namespace: str = "lane") -> Topology:
    return declare(DEFAULT_LANES, names=Names(namespace), broker_version=version)


def wait_queues(topology: Topology) -> list[Queue]:
    return [each for each in topology.queues if each.name.startswith("lane.delay.")]


@pytest.mark.parametrize(
    ("version", "quorum_intake", "priorities"),
    [
        ("4.3.6", True, "strict, 0 to 31"),
        ("4.3.6+deb", True, "strict, 0 to 31"),
        ("4.4.0-rc.1", True, "strict, 0 to 31"),
        ("5.0.0", True, "strict, 0 to 31"),
        ("4.2.1", True, "two classes, above 4 is high"),
        ("4.0.5", True, "two classes, above 4 is high"),
        ("3.13.7", False, "strict, 0 to 9"),
        ("3.10.8", False, "strict, 0 to 9"),
    ],
)
def test_the_features_follow_from_the_brokers_version(version: str, quorum_intake: bool, priorities: str) -> None:
    broker = Broker(version)

    assert (broker.quorum_intake, broker.priorities) == (quorum_intake, priorities)
    assert priorities in declared(version).note


@pytest.mark.parametrize("version", ["3.9.29", "3.8.0", "2.8.7"])
def test_a_broker_before_3_10_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"too old: 3\.10 or later is needed .*, 4\.3\.5 or later is recommended"):
        declared(version)


@pytest.mark.parametrize("version", ["", "unknown", "4", "v4.3"])
def test_text_that_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match="not a RabbitMQ version"):
        declared(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_due_queues_never_refuse_a_message(version: str) -> None:
    assert declared(version).queue("lane.batch.due").arguments == {
        "x-queue-type": "quorum",
        "x-queue-leader-locator": "balanced",
        "x-overflow": "reject-publish",
        "x-delivery-limit": 20,
        "x-dead-letter-exchange": "lane.fallen",
        "x-dead-letter-strategy": "at-least-once",
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_delays_survive_a_restart_of_the_broker(version: str) -> None:
    queues = wait_queues(declared(version))

    assert [each.arguments["x-message-ttl"] for each in queues] == [100 * 2**level for level in range(29)]
    assert all(each.type == "quorum" for each in queues)
    assert all(each.arguments["x-dead-letter-strategy"] == "at-least-once" for each in queues)
    assert all(each.arguments["x-overflow"] == "reject-publish" for each in queues)


@pytest.mark.parametrize(
    ("version", "limit"), [("4.3.6", {"x-delivery-limit": -1}), ("4.0.5", {"x-delivery-limit": -1}), ("3.10.8", {})]
)
@pytest.mark.parametrize("name", ["lane.dead", "lane.fallen", "lane.control"])
def test_queues_that_must_not_lose_messages_have_no_length_limit(
    version: str, limit: dict[str, int], name: str
) -> None:
    kept = {"x-queue-type": "quorum", "x-queue-leader-locator": "balanced"}

    assert declared(version).queue(name).arguments == {**kept, **limit}


@pytest.mark.parametrize("version", VERSIONS)
def test_no_target_of_dead_lettering_is_limited_and_no_queue_changes_the_routing_key(version: str) -> None:
    topology = declared(version)
    targets = {each.arguments.get("x-dead-letter-exchange") for each in topology.queues}
    fed = {each.destination for each in topology.bindings if each.source in targets}

    assert not [each.name for each in topology.queues if each.name in fed and "x-max-length" in each.arguments]
    assert not [each.name for each in topology.queues if "x-dead-letter-routing-key" in each.arguments]


def test_only_the_internal_exchange_leads_to_due_queues() -> None:
    assert [each.name for each in declared("4.3.6").exchanges if each.internal] == ["lane.due"]


def test_every_name_is_unique_and_every_binding_has_its_source_and_target() -> None:
    topology = declared("4.3.6")
    exchanges = [each.name for each in topology.exchanges]
    queues = [each.name for each in topology.queues]

    assert len(set(exchanges)) == len(exchanges)
    assert len(set(queues)) == len(queues)
    assert {each.source for each in topology.bindings} <= set(exchanges)
    assert {each.destination for each in topology.bindings if each.destination_kind == "queue"} == {
        name
        for name in queues
        if name != "lane.batches"  # workers publish to it by its name
    }


def test_all_names_follow_the_namespace() -> None:
    topology = declared("4.3.6", "acme")
    declared_objects: list[Exchange | Queue] = [*topology.exchanges, *topology.queues]
    names = {each.name for each in declared_objects}
    pointed_at = {
        value
        for each in declared_objects
        for key, value in each.arguments.items()
        if key in ("alternate-exchange", "x-dead-letter-exchange")
    }
    bits = {key for each in topology.bindings for key in each.arguments if key != "x-match"}

    assert all(each.startswith("acme.") for each in names)
    assert pointed_at <= names
    assert all(each.startswith("acme-d") for each in bits)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_queue_sets_its_number_of_members_so_existing_queues_can_be_declared_again(version: str) -> None:
    assert not any("x-quorum-initial-group-size" in queue.arguments for queue in declared(version).queues)
