"""Every delay up to a year takes the right way through the cascade of wait queues."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanekeeper.contract.names import Names
from topology import delays
from topology.declaration import Binding, Topology, declare
from topology.lanes import DEFAULT_LANES

NAMES = Names()
TOPOLOGY = declare(DEFAULT_LANES, names=NAMES, broker_version="4.3.6")
KEYS = ("critical.support.chat", "normal.crm", "batch.a.b.c.d")


class Router:
    """RabbitMQ's routing and dead-lettering, as far as delays use it, for a declared topology."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def deliver(self, exchange: str, key: str, headers: Mapping[str, bool]) -> tuple[list[str], int]:
        """The queues in which the message ends, and how many ms it waited on its way."""
        waited = 0
        queues = self._queues(exchange, key, headers)
        while len(queues) == 1 and "x-message-ttl" in (arguments := self._topology.queue(queues[0]).arguments):
            waited += int(arguments["x-message-ttl"])
            key = str(arguments.get("x-dead-letter-routing-key", key))
            queues = self._queues(str(arguments["x-dead-letter-exchange"]), key, headers)
        return queues, waited

    def _queues(self, exchange: str, key: str, headers: Mapping[str, bool]) -> list[str]:
        here = next(each for each in self._topology.exchanges if each.name == exchange)
        matching = [
            each
            for each in self._topology.bindings
            if each.source == exchange and _matches(here.type, each, key, headers)
        ]
        if not matching:
            alternate = here.arguments.get("alternate-exchange")
            return self._queues(str(alternate), key, headers) if alternate else []
        return [
            queue
            for each in matching
            for queue in (
                [each.destination] if each.destination_kind == "queue" else self._queues(each.destination, key, headers)
            )
        ]


def _matches(kind: str, binding: Binding, key: str, headers: Mapping[str, bool]) -> bool:
    if kind == "headers":
        assert binding.arguments["x-match"] == "all"
        return all(headers.get(name) is value for name, value in binding.arguments.items() if name != "x-match")
    if kind == "topic":
        assert binding.routing_key.endswith("#")
        return binding.routing_key == "#" or key.split(".")[0] == binding.routing_key.removesuffix(".#")
    return True


@given(delay_ms=st.integers(-5, delays.MAX_DELAY_MS), key=st.sampled_from(KEYS))
def test_a_message_waits_exactly_its_delay_and_ends_in_its_lanes_due_queue(delay_ms: int, key: str) -> None:
    hop = delays.hop(delay_ms, NAMES)

    queues, waited_ms = Router(TOPOLOGY).deliver(hop.exchange, key, hop.headers)

    assert queues == [NAMES.due(key.split(".")[0])]
    assert waited_ms == max(0, -(-delay_ms // 100) * 100)
    assert hop.delay_ms == waited_ms


def test_a_year_is_the_longest_delay() -> None:
    assert delays.hop(delays.MAX_DELAY_MS, NAMES).exchange == NAMES.delay(delays.LEVELS - 1)
    with pytest.raises(ValueError, match="longer than a year"):
        delays.hop(delays.MAX_DELAY_MS + 1, NAMES)
