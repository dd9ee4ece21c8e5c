"""Compares a broker with what is declared. Each difference is a line for people and a dict for machines.

What is in our namespace but not declared (a former lane's queue, a binding made by hand) is reported as extra and never
deleted. What is in no namespace of ours is ignored.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lanekeeper.contract.names import Names
from topology.model import Arguments, Binding, Exchange, Queue, Topology, Value

REPLICAS = 3
"""Members of a quorum queue that is declared in a cluster of three or more: RabbitMQ's own default. The argument that
would say so (`x-quorum-initial-group-size`) is compared: with it, no queue that exists could be declared again."""
Change = Literal["missing", "differs", "extra"]
What = Literal["exchange", "queue", "binding"]

BOUNDS = frozenset({"policy max-length", "policy max-length-bytes", "policy overflow"})
"""What a policy may set for `lane.control` (`topology export` has one)."""
EFFECTIVE_POLICIES = frozenset(
    {
        "dead-letter-exchange",
        "dead-letter-routing-key",
        "dead-letter-strategy",
        "delivery-limit",
        "expires",
        "max-length",
        "max-length-bytes",
        "message-ttl",
        "overflow",
    }
)
"""Policy keys that change what happens to a message. Others (where leaders are placed, say) are up to the operator."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing on the broker that is not as declared."""

    change: Change
    what: What
    name: str
    """The name of an exchange or queue, or the label of a binding."""
    field: str | None = None
    """What differs: `type`, `durable`, `argument x-max-length`, `policy message-ttl`; None for missing and extra."""
    wanted: Value | None = None
    """None: nothing is declared for it."""
    found: Value | None = None
    """None: nothing was found for it."""
    remedy: str | None = None
    """The command that corrects it, if that is not `topology apply`."""

    @property
    def line(self) -> str:
        """The difference as one line for people."""
        match self.change:
            case "missing":
                return f"{self.what} {self.name} is missing"
            case "extra":
                return f"{self.what} {self.name} is on the broker, but not declared"
            case "differs":
                said = f"{self.what} {self.name}: {self.field} is {_said(self.found)}, declared is {_said(self.wanted)}"
                return said if self.remedy is None else f"{said}; mend it with: {self.remedy}"


def compare(declared: Topology, found: Topology) -> list[Difference]:
    """Name every difference, in the order of the declaration, what is not declared last."""
    return [
        *_compare_exchanges(declared, found),
        *_compare_queues(declared, found),
        *_compare_bindings(declared, found),
        *_extra(declared, found),
    ]


def without_levels(differences: Sequence[Difference], names: Names) -> tuple[Sequence[Difference], int]:
    """The differences without the missing parts of delay levels, and the number of these levels. One level stays."""
    level = re.compile(re.escape(names.delay_prefix) + r"\d+")
    levels = {found[0] for each in differences if each.change == "missing" and (found := level.findall(each.name))}
    if len(levels) < 2:
        return differences, 0
    return [each for each in differences if each.change != "missing" or level.search(each.name) is None], len(levels)


def _compare_exchanges(declared: Topology, found: Topology) -> Iterator[Difference]:
    there = {each.name: each for each in found.exchanges}
    for exchange in declared.exchanges:
        if exchange.name in there:
            yield from _compare_fields("exchange", exchange.name, _fields(exchange), _fields(there[exchange.name]))
        else:
            yield Difference("missing", "exchange", exchange.name)


def _compare_queues(declared: Topology, found: Topology) -> Iterator[Difference]:
    there = {each.name: each for each in found.queues}
    for queue in declared.queues:
        if queue.name in there:
            seen = _fields(there[queue.name])
            if queue.name == Names(declared.namespace).control and seen.get("policy overflow") == "reject-publish":
                seen = {field: value for field, value in seen.items() if field not in BOUNDS}
            yield from _compare_fields("queue", queue.name, _fields(queue), seen)
            yield from _compare_members(there[queue.name], declared.namespace, found.nodes)
        else:
            yield Difference("missing", "queue", queue.name)


def _compare_members(found: Queue, namespace: str, nodes: tuple[str, ...]) -> Iterator[Difference]:
    """Whether a queue has all its replicas. It has not if the cluster has grown since it was declared."""
    wanted = min(REPLICAS, len(nodes))
    if found.members and len(found.members) < wanted:
        others = [node for node in nodes if node not in found.members][: wanted - len(found.members)]
        pattern = re.escape(f"{namespace}.")
        grow = " && ".join(f"rabbitmq-queues grow {node} all --queue-pattern '^{pattern}'" for node in others)
        yield Difference("differs", "queue", found.name, "members", wanted, len(found.members), grow)


def _compare_bindings(declared: Topology, found: Topology) -> Iterator[Difference]:
    there = {_identity(each) for each in found.bindings}
    for binding in declared.bindings:
        if _identity(binding) not in there:
            yield Difference("missing", "binding", binding.label)


def _extra(declared: Topology, found: Topology) -> Iterator[Difference]:
    names = Names(declared.namespace)
    exchanges = {each.name for each in declared.exchanges}
    queues = {each.name for each in declared.queues}
    bindings = {_identity(each) for each in declared.bindings}
    for exchange in found.exchanges:
        if _is_ours(exchange.name, names) and exchange.name not in exchanges:
            yield Difference("extra", "exchange", exchange.name)
    for queue in found.queues:
        if _is_ours(queue.name, names) and queue.name not in queues:
            yield Difference("extra", "queue", queue.name)
    for binding in found.bindings:
        if _concerns_us(binding, names) and _identity(binding) not in bindings:
            yield Difference("extra", "binding", binding.label)


def _is_ours(name: str, names: Names) -> bool:
    """Reply queues are in our namespace but belong to the requesters."""
    return name.startswith(f"{names.namespace}.") and not name.startswith(names.reply_prefix)


def _concerns_us(binding: Binding, names: Names) -> bool:
    """Whether a binding begins or ends at something of ours.

    Anybody may bind to events, and workers bind their own queues to control. Any other binding is reported: one on
    `lane.requests` reads prompts, and keeps requests without a lane from reaching `lane.fallen`.
    """
    if _is_ours(binding.destination, names):
        return True
    return _is_ours(binding.source, names) and binding.source not in (names.events, names.control)


def _fields(thing: Exchange | Queue) -> dict[str, Value]:
    """All properties of an object that are compared, by the names under which differences are reported."""
    own: dict[str, Value]
    match thing:
        case Exchange():
            own = {"type": thing.type, "internal": thing.internal}
            policy: Arguments = {}
        case Queue():
            own = {"exclusive": thing.exclusive}
            policy = thing.policy
    return {
        **own,
        "durable": thing.durable,
        "auto_delete": thing.auto_delete,
        **{f"argument {key}": value for key, value in thing.arguments.items()},
        **{f"policy {key}": value for key, value in policy.items() if key in EFFECTIVE_POLICIES},
    }


def _compare_fields(
    what: What, name: str, declared: Mapping[str, Value], found: Mapping[str, Value]
) -> Iterator[Difference]:
    for field in (*declared, *(key for key in found if key not in declared)):
        wanted, actual = declared.get(field), found.get(field)
        # True equals 1 in Python, but not on a broker.
        if type(wanted) is not type(actual) or wanted != actual:
            yield Difference("differs", what, name, field, wanted, actual)


def _identity(binding: Binding) -> tuple[str, ...]:
    """What identifies a binding. For the broker too, other arguments make another binding."""
    return (
        binding.source,
        binding.destination_kind,
        binding.destination,
        binding.routing_key,
        json.dumps(dict(binding.arguments), sort_keys=True),
    )


def _said(value: Value | None) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
