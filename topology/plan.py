"""Compares the topology found on a broker with the declared one, and lists the differences.

An object in our namespace that is not declared (a former lane's queue, a binding made by hand) is reported as extra,
and never deleted. Objects outside our namespace are ignored.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lanekeeper.contract.names import Names
from topology.model import Arguments, Binding, Exchange, Queue, Topology, Value

REPLICAS = 3
"""How many replicas a quorum queue has in a cluster of three or more nodes: RabbitMQ's default. It is not set as an
argument (`x-quorum-initial-group-size`), because declaring an existing queue with a new argument fails."""
Change = Literal["missing", "differs", "extra"]
What = Literal["exchange", "queue", "binding"]

ALLOWED_CONTROL_POLICY = frozenset({"policy max-length", "policy max-length-bytes", "policy overflow"})
"""Fields that a policy may set for `lane.control` without a difference being reported (`topology export` contains such
a policy)."""
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
"""The keys of RabbitMQ policies that change what happens to a message. Other keys (for example for the placement of
leaders) are not compared: operators may set them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One object on the broker, or one of its properties, that is not as declared."""

    change: Change
    what: What
    name: str
    """The name of an exchange or queue, or the label of a binding."""
    field: str | None = None
    """The property that differs: `type`, `durable`, `argument x-max-length`, `policy message-ttl`; None if the whole
    object is missing or extra."""
    wanted: Value | None = None
    """The value in the declaration; None if the declaration does not set this property."""
    found: Value | None = None
    """The value on the broker; None if the property is not set there."""
    remedy: str | None = None
    """The command that corrects the difference, if `topology apply` does not."""

    @property
    def line(self) -> str:
        """A sentence that describes the difference, for commands and logs."""
        match self.change:
            case "missing":
                return f"{self.what} {self.name} is missing"
            case "extra":
                return f"{self.what} {self.name} is on the broker, but not declared"
            case "differs":
                found, wanted = _value_text(self.found), _value_text(self.wanted)
                text = f"{self.what} {self.name}: {self.field} is {found}, declared is {wanted}"
                return text if self.remedy is None else f"{text}; mend it with: {self.remedy}"


def compare(declared: Topology, found: Topology) -> list[Difference]:
    """List every difference between the declared topology and the one found on a broker, in the order of the
    declaration. Objects that are not declared come last."""
    return [
        *_compare_exchanges(declared, found),
        *_compare_queues(declared, found),
        *_compare_bindings(declared, found),
        *_extra(declared, found),
    ]


def without_levels(differences: Sequence[Difference], names: Names) -> tuple[Sequence[Difference], int]:
    """Leave out the missing objects of the delay cascade's levels, so that they can be reported in one line. Returns
    the other differences, and the number of levels with missing objects. If it is only one level, nothing is left out,
    and 0 is returned."""
    level = re.compile(re.escape(names.delay_prefix) + r"\d+")
    missing = {found[0] for one in differences if one.change == "missing" and (found := level.findall(one.name))}
    if len(missing) < 2:
        return differences, 0
    return [one for one in differences if one.change != "missing" or level.search(one.name) is None], len(missing)


def _compare_exchanges(declared: Topology, found: Topology) -> Iterator[Difference]:
    by_name = {exchange.name: exchange for exchange in found.exchanges}
    for exchange in declared.exchanges:
        if exchange.name in by_name:
            yield from _compare_fields("exchange", exchange.name, _fields(exchange), _fields(by_name[exchange.name]))
        else:
            yield Difference("missing", "exchange", exchange.name)


def _compare_queues(declared: Topology, found: Topology) -> Iterator[Difference]:
    by_name = {queue.name: queue for queue in found.queues}
    for queue in declared.queues:
        if queue.name in by_name:
            actual = _fields(by_name[queue.name])
            if queue.name == Names(declared.namespace).control and actual.get("policy overflow") == "reject-publish":
                actual = {field: value for field, value in actual.items() if field not in ALLOWED_CONTROL_POLICY}
            yield from _compare_fields("queue", queue.name, _fields(queue), actual)
            yield from _compare_members(by_name[queue.name], declared.namespace, found.nodes)
        else:
            yield Difference("missing", "queue", queue.name)


def _compare_members(found: Queue, namespace: str, nodes: tuple[str, ...]) -> Iterator[Difference]:
    """Report a quorum queue that has too few replicas, because it was declared before nodes were added to the
    cluster."""
    wanted = min(REPLICAS, len(nodes))
    if found.members and len(found.members) < wanted:
        others = [node for node in nodes if node not in found.members][: wanted - len(found.members)]
        pattern = re.escape(f"{namespace}.")
        grow = " && ".join(f"rabbitmq-queues grow {node} all --queue-pattern '^{pattern}'" for node in others)
        yield Difference(
            "differs", "queue", found.name, field="members", wanted=wanted, found=len(found.members), remedy=grow
        )


def _compare_bindings(declared: Topology, found: Topology) -> Iterator[Difference]:
    existing = {_identity(binding) for binding in found.bindings}
    for binding in declared.bindings:
        if _identity(binding) not in existing:
            yield Difference("missing", "binding", binding.label)


def _extra(declared: Topology, found: Topology) -> Iterator[Difference]:
    names = Names(declared.namespace)
    exchanges = {exchange.name for exchange in declared.exchanges}
    queues = {queue.name for queue in declared.queues}
    bindings = {_identity(binding) for binding in declared.bindings}
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
    """Whether an exchange or queue belongs to our installation, by the first word of its name. Reply queues do not:
    they belong to the requesters."""
    return name.startswith(f"{names.namespace}.") and not name.startswith(names.reply_prefix)


def _concerns_us(binding: Binding, names: Names) -> bool:
    """Whether a binding begins or ends at an object of ours, and so is reported if it is not declared.

    Bindings from `lane.events` and `lane.control` to foreign queues are allowed: anybody may bind to events, and
    workers bind queues of their own to control. A foreign binding on `lane.requests` is reported, because its queue
    gets prompts, and because requests without a lane would go there instead of to `lane.fallen`.
    """
    if _is_ours(binding.destination, names):
        return True
    return _is_ours(binding.source, names) and binding.source not in (names.events, names.control)


def _fields(thing: Exchange | Queue) -> dict[str, Value]:
    """The properties of an object that are compared. The keys are the names in `Difference.field`."""
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
        wanted, value = declared.get(field), found.get(field)
        # True equals 1 in Python, but not in RabbitMQ
        if type(wanted) is not type(value) or wanted != value:
            yield Difference("differs", what, name, field=field, wanted=wanted, found=value)


def _identity(binding: Binding) -> tuple[str, ...]:
    """A key that is equal for equal bindings. Bindings that differ only in their arguments are different ones, as on
    the broker."""
    return (
        binding.source,
        binding.destination_kind,
        binding.destination,
        binding.routing_key,
        json.dumps(dict(binding.arguments), sort_keys=True),
    )


def _value_text(value: Value | None) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
