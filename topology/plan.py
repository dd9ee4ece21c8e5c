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
from topology.model import Arguments, Binding, Exchange, Queue, Topology, Value

REPLICAS = 3
"""How many replicas a quorum queue has in a cluster of three or more nodes: RabbitMQ's default. It is not set as an
argument (`x-quorum-initial-group-size`), because declaring an existing queue with a new argument fails."""
Change = Literal["missing", "differs", "extra"]
What = Literal["exchange", "queue", "binding"]

CONTROL_POLICIES = frozenset({"max-length", "max-length-bytes", "overflow"})
"""The keys of a policy for `lane.control` that are not compared if the policy makes the full queue refuse publishes,
because the definitions that `topology export` writes contain such a policy."""
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
leaders) are not compared, because operators may set them freely."""


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
    """The command that corrects the difference. None if `topology apply` corrects it, or if no command is known."""

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
            differences.append(Difference("extra", what, _name(thing)))
    return differences


def without_levels(differences: Sequence[Difference], names: Names) -> tuple[Sequence[Difference], int]:
    """Leave out the missing exchanges, queues and bindings of the delay cascade (the levels of wait queues that hold
    delayed messages), so that they can be reported in one line. Returns the other differences, and the number of levels
    with missing objects. If it is only one level, nothing is left out, and 0 is returned."""
    level = re.compile(re.escape(names.delay_prefix) + r"\d+")
    missing = {found[0] for one in differences if one.change == "missing" and (found := level.findall(one.name))}
    if len(missing) < 2:
        return differences, 0
    return [one for one in differences if one.change != "missing" or level.search(one.name) is None], len(missing)


def _by_identity(topology: Topology) -> dict[tuple[What, str], Exchange | Queue | Binding]:
    """All objects of a topology by their kind and a text that is equal for equal objects: the name, or all properties
    of a binding. As on the broker, two bindings that differ only in their arguments are different bindings."""
    return {
        **{("exchange", exchange.name): exchange for exchange in topology.exchanges},
        **{("queue", queue.name): queue for queue in topology.queues},
        **{("binding", json.dumps(asdict(binding), sort_keys=True)): binding for binding in topology.bindings},
    }


def _name(thing: Exchange | Queue | Binding) -> str:
    return thing.label if isinstance(thing, Binding) else thing.name


def _fields(thing: Exchange | Queue, names: Names) -> dict[str, Value]:
    """The properties of an object that are compared. The keys are the names in `Difference.field`."""
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
    """Report a quorum queue that has too few replicas, because it was declared before nodes were added to the
    cluster."""
    wanted = min(REPLICAS, len(nodes))
    if isinstance(found, Queue) and found.members and len(found.members) < wanted:
        others = [node for node in nodes if node not in found.members][: wanted - len(found.members)]
        pattern = re.escape(f"{namespace}.")
        grow = " && ".join(f"rabbitmq-queues grow {node} all --queue-pattern '^{pattern}'" for node in others)
        yield Difference(
            "differs", "queue", found.name, field="members", wanted=wanted, found=len(found.members), remedy=grow
        )


def _concerns_us(thing: Exchange | Queue | Binding, names: Names) -> bool:
    """Whether an object that is not declared is reported: an exchange or queue of ours, or a binding that begins or
    ends at an exchange or queue of ours.

    Bindings from `lane.events` and `lane.control` to foreign queues are allowed: anybody may bind to events, and
    workers bind queues of their own to control. A foreign binding on `lane.requests` is reported, because its queue
    gets prompts, and because requests without a lane would go there instead of to `lane.fallen`.
    """
    if not isinstance(thing, Binding):
        return _is_ours(thing.name, names)
    return _is_ours(thing.destination, names) or (
        _is_ours(thing.source, names) and thing.source not in (names.events, names.control)
    )


def _is_ours(name: str, names: Names) -> bool:
    """Whether an exchange or queue belongs to our installation, by the first word of its name. Reply queues do not
    belong to it, but to the requesters."""
    return name.startswith(f"{names.namespace}.") and not name.startswith(names.reply_prefix)


def _value_text(value: Value | None) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
