"""Every difference is reported by name; objects of others are ignored."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lanekeeper.contract.names import Names
from topology.declaration import Binding, Exchange, Queue, Topology, Value, declare
from topology.lanes import DEFAULT_LANES
from topology.plan import Difference, compare, without_levels

DECLARED = declare(DEFAULT_LANES, names=Names(), broker_version="4.3.6")
FOUND = replace(DECLARED, namespace="", lanes=(), note="")


def with_exchange(name: str, **changes: Any) -> Topology:
    return replace(
        FOUND,
        exchanges=tuple(replace(each, **changes) if each.name == name else each for each in FOUND.exchanges),
    )


def with_queue(name: str, **changes: Any) -> Topology:
    return replace(
        FOUND,
        queues=tuple(replace(each, **changes) if each.name == name else each for each in FOUND.queues),
    )


def with_argument(name: str, key: str, value: Value | None) -> Topology:
    arguments = {**DECLARED.queue(name).arguments, key: value}
    return with_queue(name, arguments={key: each for key, each in arguments.items() if each is not None})


def without_binding(wanted: Callable[[Binding], bool]) -> Topology:
    return replace(FOUND, bindings=tuple(each for each in FOUND.bindings if not wanted(each)))


def with_more(*things: Exchange | Queue | Binding) -> Topology:
    return replace(
        FOUND,
        exchanges=FOUND.exchanges + tuple(each for each in things if isinstance(each, Exchange)),
        queues=FOUND.queues + tuple(each for each in things if isinstance(each, Queue)),
        bindings=FOUND.bindings + tuple(each for each in things if isinstance(each, Binding)),
    )


CHANGES: list[tuple[Topology, str]] = [
    (replace(FOUND, queues=FOUND.queues[1:]), "queue lane.critical is missing"),
    (replace(FOUND, exchanges=FOUND.exchanges[1:]), "exchange lane.fallen is missing"),
    (
        without_binding(lambda each: each.destination == "lane.batch.due"),
        "binding lane.due → queue lane.batch.due, key 'batch.#' is missing",
    ),
    (
        without_binding(lambda each: each.arguments.get("lane-d03") is False),
        "binding lane.delay.03 → exchange lane.delay.02, key '', lane-d03=false, x-match=all is missing",
    ),
    (
        with_argument("lane.critical", "x-max-length", 5),
        "queue lane.critical: argument x-max-length is 5, declared is 10000",
    ),
    (with_argument("lane.dead", "x-expires", 1000), "queue lane.dead: argument x-expires is 1000, declared is not set"),
    (with_queue("lane.normal", durable=False), "queue lane.normal: durable is false, declared is true"),
    (with_queue("lane.normal", auto_delete=True), "queue lane.normal: auto_delete is true, declared is false"),
    (with_queue("lane.normal", exclusive=True), "queue lane.normal: exclusive is true, declared is false"),
    (
        with_queue("lane.normal", policy={"message-ttl": 60}),
        "queue lane.normal: policy message-ttl is 60, declared is not set",
    ),
    (
        with_argument("lane.delay.04", "x-queue-mode", "träge"),
        'queue lane.delay.04: argument x-queue-mode is "träge", declared is not set',
    ),
    (with_exchange("lane.dead", type="direct"), 'exchange lane.dead: type is "direct", declared is "topic"'),
    (with_exchange("lane.due", internal=False), "exchange lane.due: internal is false, declared is true"),
    (with_exchange("lane.events", durable=False), "exchange lane.events: durable is false, declared is true"),
    (
        with_exchange("lane.requests", arguments={}),
        'exchange lane.requests: argument alternate-exchange is not set, declared is "lane.fallen"',
    ),
    (with_more(Queue("lane.gold")), "queue lane.gold is on the broker, but not declared"),
    (with_more(Exchange("lane.old", "topic")), "exchange lane.old is on the broker, but not declared"),
    (
        with_more(Binding("lane.requests", "tap", routing_key="#")),
        "binding lane.requests → queue tap, key '#' is on the broker, but not declared",
    ),
    (
        with_more(Binding("lane.requests", "lane.critical", routing_key="normal.#")),
        "binding lane.requests → queue lane.critical, key 'normal.#' is on the broker, but not declared",
    ),
]


@pytest.mark.parametrize(("found", "line"), CHANGES, ids=[line for _, line in CHANGES])
def test_a_single_change_is_named(found: Topology, line: str) -> None:
    assert [each.line for each in compare(DECLARED, found)] == [line]


def test_objects_that_are_not_ours_are_ignored() -> None:
    others = with_more(
        Exchange("orders", "direct"),
        Queue("laneway"),
        Queue("lane.reply.support"),
        Queue("amq.gen-abc", exclusive=True),
        Binding("orders", "laneway"),
        Binding("lane.events", "amq.gen-abc", routing_key="#"),
        Binding("lane.control", "amq.gen-abc", routing_key="status"),
    )

    assert compare(DECLARED, others) == []


def test_a_policy_that_limits_the_control_queue_is_accepted_if_a_full_queue_refuses() -> None:
    bound = {"max-length": 5, "max-length-bytes": 10, "overflow": "reject-publish"}
    assert compare(DECLARED, with_queue("lane.control", policy=bound)) == []
    assert compare(DECLARED, with_queue("lane.control", policy={"max-length": 5}))


def test_the_arguments_1_and_true_are_different() -> None:
    assert len(compare(DECLARED, with_argument("lane.delay.00", "x-message-ttl", True))) == 1


NODES = ("rabbit@a", "rabbit@b", "rabbit@c", "rabbit@d")


def kept_on(queue: str, members: tuple[str, ...], nodes: tuple[str, ...]) -> list[Difference]:
    return compare(DECLARED, replace(with_queue(queue, members=members), nodes=nodes))


def test_a_queue_with_too_few_members_is_reported_with_the_commands_that_add_them() -> None:
    (difference,) = kept_on("lane.critical", NODES[1:2], NODES)

    assert (difference.field, difference.wanted, difference.found) == ("members", 3, 1)
    assert difference.line == (
        "queue lane.critical: members is 1, declared is 3; mend it with: "
        r"rabbitmq-queues grow rabbit@a all --queue-pattern '^lane\.' && "
        r"rabbitmq-queues grow rabbit@c all --queue-pattern '^lane\.'"
    )


@pytest.mark.parametrize(
    ("members", "nodes"),
    [
        (NODES[:1], NODES[:1]),
        (NODES[:2], NODES[:2]),
        (NODES[:3], NODES),
        (NODES, NODES),
        ((), NODES),  # a classic queue, or a quorum queue without statistics yet
        (NODES[:1], ()),  # a user who is not allowed to list the nodes
    ],
)
def test_three_members_are_enough_or_as_many_as_there_are_nodes(
    members: tuple[str, ...], nodes: tuple[str, ...]
) -> None:
    assert kept_on("lane.critical", members, nodes) == []


def test_missing_delay_levels_are_summarised_and_other_differences_are_listed() -> None:
    found = compare(DECLARED, Topology())
    shown, levels = without_levels(found, Names())
    assert levels == 29
    assert len(shown) < 45 + 7 * 8 < 140 < len(found)
    assert not [each for each in shown if "lane.delay." in each.name and each.what != "binding"]
