"""Waits for answers, and says of requests that got none where they are, so that a failure in CI explains itself."""

import json
import time
from typing import Protocol

from tests.faults.checker import Asked, Called, History, Published
from tests.faults.ground import Crew
from tests.faults.load import Load
from tests.faults.nodes import Cluster
from tests.support.engine import Unavailable

SHOWN = 10
"""Requests that are shown; the others are counted."""
WITHIN_S = 20.0
QUEUES = ("rabbitmqctl", "--quiet", "--timeout=15", "list_queues", "--formatter=json", "name", "messages_ready",
          "messages_unacknowledged", "consumers", "leader", "online")  # fmt: skip
CHANNELS = """
    [{P, erlang:process_info(P, [message_queue_len, current_stacktrace])} ||
     P <- pg_local:get_members(rabbit_channels), erlang:process_info(P, message_queue_len) =/= {message_queue_len, 0}].
"""
"""Channels that have not processed what they got: they wait for something, and their stack says for what."""


class Running(Protocol):
    """A `Ground`, or the service of `test_cluster.py`."""

    broker: Cluster
    crew: Crew
    load: Load
    history: History

    def calls(self) -> list[Called]: ...


async def all_answered(service: Running, *, within_s: float) -> bool:
    """Wait until every request is answered. If some are not, print what is known of them."""
    if await service.load.answered(within_s=within_s):
        return True
    print(f"not answered within {within_s:g} s:", *_of_requests(service), *await _of_nodes(service.broker), sep="\n")
    return False


def _of_requests(service: Running) -> list[str]:
    now_s = time.monotonic()
    unanswered = service.load.unanswered
    asked = {each.question: each for each in service.history.events if isinstance(each, Asked)}
    said = []
    for question in unanswered[:SHOWN]:
        ask = asked[question]
        published = [
            f"{each.told} after {each.at_s - each.sent_s:.1f} s, {now_s - each.at_s:.1f} s ago"
            for each in service.history.events
            if isinstance(each, Published) and each.question == question
        ]
        calls = [
            f"{each.outcome}, begun {now_s - each.at_s:.1f} s ago"
            for each in service.calls()
            if each.identity == ask.identity
        ]
        said.append(
            f"- {question}, lane {ask.lane}, asked {now_s - ask.at_s:.1f} s ago; "
            f"published: {'; '.join(published) or 'not yet'}; calls: {'; '.join(calls) or 'none'}"
        )
        said += [f"    {json.dumps(event)}" for event in service.crew.told_of(ask.identity)]
    return [*said, f"- {len(unanswered)} in all"]


async def _of_nodes(broker: Cluster) -> list[str]:
    said = []
    for node in broker.nodes:
        said.append(f"{node.name}: queues with messages:")
        try:
            found = json.loads(await node.run(*QUEUES, within_s=WITHIN_S))
            said += [
                f"    {json.dumps(each)}"
                for each in found
                if (each["messages_ready"], each["messages_unacknowledged"]) != (0, 0)
            ]
            said.append(f"  busy channels: {await node.run('rabbitmqctl', 'eval', CHANNELS, within_s=WITHIN_S)}")
        except (AssertionError, Unavailable, ValueError) as error:
            said.append(f"    unknown: {error}")
    return said
