"""What a broker has that is not as declared, each difference by name: for people as a line, for machines as a dict.

Things of ours that are not declared (an earlier lane's queue, a binding made by hand) are reported as extra; nothing is
ever deleted for them. What does not carry our namespace is somebody else's, and left out.
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
"""What a policy may set for `lane.control` (`topology export` has one): a full one refuses its publishers."""
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
"""Policy keys that change what becomes of a message; others (where leaders are placed, say) are the operator's own."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing on the broker that is not as declared."""

    change: Change
    what: What
    name: str
    """Of an exchange or queue its name, of a binding its label."""
    field: str | None = None
    """What differs: `type`, `durable`, `argument x-max-length`, `policy message-ttl`; None for missing and extra."""
    wanted: Value | None = None
    """None: nothing is declared for it."""
    found: Value | None = None
    """None: nothing was found for it."""
    remedy: str | None = None
    """The command that mends it, where it is not `topology apply`."""

    @property
    def line(self) -> str:
        """One line for people."""
        match self.change:
            case "missing":
                return f"{self.what} {self.name} is missing"
            case "extra":
                return f"{self.what} {self.name} is on the broker, but not declared"
            case "differs":
                said = f"{self.what} {self.name}: {self.field} is {_said(self.found)}, declared is {_said(self.wanted)}"
                return said if self.remedy is None else f"{said}; mend it with: {self.remedy}"

    def as_json(self) -> dict[str, Value | None]:
        """All fields, as JSON has them."""
        return {
            "change": self.change,
            "what": self.what,
            "name": self.name,
            "field": self.field,
            "wanted": self.wanted,
            "found": self.found,
            "remedy": self.remedy,
        }


def compare(declared: Topology, found: Topology) -> list[Difference]:
    """Name every difference, in the order of the declaration, what is not declared last."""
    return [
        *_compare_exchanges(declared, found),
        *_compare_queues(declared, found),
        *_compare_bindings(declared, found),
        *_extra(declared, found),
    ]


def without_levels(differences: Sequence[Difference], names: Names) -> tuple[Sequence[Difference], int]:
    """The differences without the missing parts of delay levels, and how many levels these are of; one is no crowd."""
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
    """Whether a queue has all of its replicas; not so where the cluster has grown since it was declared."""
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
    """Reply queues carry our namespace, but belong to those who asked."""
    return name.startswith(f"{names.namespace}.") and not name.startswith(names.reply_prefix)


def _concerns_us(binding: Binding, names: Names) -> bool:
    """Whether a binding begins or ends at something of ours.

    Events are there for anyone to bind to, and workers bind queues of their own to control. Any other tap is reported:
    one on `lane.requests` reads prompts, and keeps what has no lane from reaching `lane.fallen`.
    """
    if _is_ours(binding.destination, names):
        return True
    return _is_ours(binding.source, names) and binding.source not in (names.events, names.control)


def _fields(thing: Exchange | Queue) -> dict[str, Value]:
    """What can differ, by the name that it is reported under."""
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
        # True equals 1 in Python, and not on a broker.
        if type(wanted) is not type(actual) or wanted != actual:
            yield Difference("differs", what, name, field, wanted, actual)


def _identity(binding: Binding) -> tuple[str, ...]:
    """What tells bindings apart; the broker too takes one with other arguments for another binding."""
    return (
        binding.source,
        binding.destination_kind,
        binding.destination,
        binding.routing_key,
        json.dumps(dict(binding.arguments), sort_keys=True),
    )


def _said(value: Value | None) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
