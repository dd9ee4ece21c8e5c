"""Compares the topology found on a broker with the declared one, and lists the differences.

An object in our namespace that is not declared (a former lane's queue, a binding made by hand) is reported as extra,
and never deleted. Objects outside our namespace are ignored.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from lanekeeper.contract.names import Names
from topology.declaration import Arguments, Binding, Exchange, Queue, Topology, Value

REPLICAS = 3
"""RabbitMQ's default in a cluster of three or more nodes. It is not set as an argument (`x-quorum-initial-group-size`),
because declaring an existing queue with a new argument fails."""
Change = Literal["missing", "differs", "extra"]
What = Literal["exchange", "queue", "binding"]

CONTROL_POLICIES = frozenset({"max-length", "max-length-bytes", "overflow"})
EFFECTIVE_POLICIES = CONTROL_POLICIES | {
    "dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy", "delivery-limit", "expires",
    "message-ttl",
}  # fmt: skip
"""The keys of policies that change what happens to a message. Others (such as for the placement of leaders) operators
may set freely."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An object on the broker, or one of its properties (`field`), that is not as declared."""

    change: Change
    what: What
    name: str
    field: str | None = None
    """`type`, `durable`, `argument x-max-length`, `policy message-ttl`; None if the whole object is missing or
    extra."""
    wanted: Value | None = None
    found: Value | None = None
    remedy: str | None = None

    @property
    def line(self) -> str:
        match self.change:
            case "missing":
                return f"{self.what} {self.name} is missing"
            case "extra":
                text = f"{self.what} {self.name} is on the broker, but not declared"
                return text if self.remedy is None else f"{text}; a former lane's goes with: {self.remedy}"
            case "differs":
                found, wanted = _value_text(self.found), _value_text(self.wanted)
                text = f"{self.what} {self.name}: {self.field} is {found}, declared is {wanted}"
                return text if self.remedy is None else f"{text}; mend it with: {self.remedy}"


def compare(declared: Topology, found: Topology) -> list[Difference]:
    """List the differences in the order of the declaration; objects that are not declared come last."""
    names = Names(declared.namespace)
    wanted, existing = _by_identity(declared), _by_identity(found)
    differences: list[Difference] = []
    for (what, identity), thing in wanted.items():
        actual = existing.get((what, identity))
        if actual is None:
            differences.append(Difference("missing", what, _name(thing)))
        elif not isinstance(thing, Binding) and not isinstance(actual, Binding):
            differences += _compare_fields(what, thing.name, _fields(thing, names), _fields(actual, names))
            differences += _compare_members(actual, declared.namespace, found.nodes)
    for (what, identity), thing in existing.items():
        if (what, identity) not in wanted and _concerns_us(thing, names):
            lane = names.lane_behind(_name(thing))
            remedy = f"lanekeeper topology apply --remove-lane {lane}" if lane else None
            differences.append(Difference("extra", what, _name(thing), remedy=remedy))
    return differences


def without_levels(differences: Sequence[Difference], names: Names) -> tuple[Sequence[Difference], int]:
    """Leave out what is missing of the delay cascade, so that it can be reported in one line. Returns the other
    differences, and the number of levels with missing objects; 0, and all differences, if it is only one level."""
    level = re.compile(re.escape(names.delay_prefix) + r"\d+")
    missing = {found[0] for one in differences if one.change == "missing" and (found := level.findall(one.name))}
    if len(missing) < 2:
        return differences, 0
    return [one for one in differences if one.change != "missing" or level.search(one.name) is None], len(missing)


def _by_identity(topology: Topology) -> dict[tuple[What, str], Exchange | Queue | Binding]:
    return {
        **{("exchange", exchange.name): exchange for exchange in topology.exchanges},
        **{("queue", queue.name): queue for queue in topology.queues},
        **{("binding", json.dumps(asdict(binding), sort_keys=True)): binding for binding in topology.bindings},
    }


def _name(thing: Exchange | Queue | Binding) -> str:
    return thing.label if isinstance(thing, Binding) else thing.name


def _fields(thing: Exchange | Queue, names: Names) -> dict[str, Value]:
    own: dict[str, Value]
    policies: Arguments = {}
    if isinstance(thing, Exchange):
        own = {"type": thing.type, "internal": thing.internal}
    else:
        own = {"exclusive": thing.exclusive}
        is_control = thing.name == names.control and thing.policy.get("overflow") == "reject-publish"
        compared = EFFECTIVE_POLICIES - CONTROL_POLICIES if is_control else EFFECTIVE_POLICIES
        policies = {key: value for key, value in thing.policy.items() if key in compared}
    return {
        **own,
        "durable": thing.durable,
        "auto_delete": thing.auto_delete,
        **{f"argument {key}": value for key, value in thing.arguments.items()},
        **{f"policy {key}": value for key, value in policies.items()},
    }


def _compare_fields(
    what: What, name: str, declared: Mapping[str, Value], found: Mapping[str, Value]
) -> Iterator[Difference]:
    for field in (*declared, *(key for key in found if key not in declared)):
        wanted, value = declared.get(field), found.get(field)
        # True equals 1 in Python, but not in RabbitMQ
        if type(wanted) is not type(value) or wanted != value:
            yield Difference("differs", what, name, field=field, wanted=wanted, found=value)


def _compare_members(found: Exchange | Queue, namespace: str, nodes: tuple[str, ...]) -> Iterator[Difference]:
    """A quorum queue has too few replicas if it was declared before nodes were added to the cluster."""
    wanted = min(REPLICAS, len(nodes))
    if isinstance(found, Queue) and found.members and len(found.members) < wanted:
        others = [node for node in nodes if node not in found.members][: wanted - len(found.members)]
        pattern = re.escape(f"{namespace}.")
        grow = " && ".join(f"rabbitmq-queues grow {node} all --queue-pattern '^{pattern}'" for node in others)
        yield Difference(
            "differs", "queue", found.name, field="members", wanted=wanted, found=len(found.members), remedy=grow
        )


def _concerns_us(thing: Exchange | Queue | Binding, names: Names) -> bool:
    """Whether an object that is not declared is reported: one of ours, or a binding that begins or ends at one. A
    foreign binding on `lane.requests` is: its queue gets prompts, and requests without a lane.
    """
    if not isinstance(thing, Binding):
        return _is_ours(thing.name, names)
    return _is_ours(thing.destination, names) or (
        _is_ours(thing.source, names) and thing.source not in (names.events, names.control)
    )


def _is_ours(name: str, names: Names) -> bool:
    return name.startswith(f"{names.namespace}.") and not name.startswith(names.reply_prefix)


def _value_text(value: Value | None) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
