"""Shows a topology to people: as a Mermaid diagram for the README, and as an outline for the terminal."""

from lanekeeper.contract.names import Names
from topology import delays
from topology.declaration import Arguments, Exchange, Topology


def mermaid(topology: Topology) -> str:
    """Draw the paths of a message as a Mermaid flowchart. The delay cascade (29 wait queues) is drawn as one node."""
    names = Names(topology.namespace)
    lowest, highest = names.delay(0), names.delay(delays.LEVELS - 1)
    queues = "\n".join(
        f'    {lane}[("{names.intake(lane)}")]\n    {lane}_due[("{names.due(lane)}")]' for lane in topology.lanes
    )
    side, aside = "", ""
    if most := _side_queues_of_a_lane(topology):
        every = names.side("&lt;lane&gt;", 0), names.side("&lt;lane&gt;", most - 1)
        side = f'    side[("{every[0]} … {every[1]}")]\n'
        aside = '  worker -- "set aside, by tenant" --> side\n'
    published = "\n".join(f'  requests -- "{names.lane_pattern(lane)}" --> {lane}' for lane in topology.lanes)
    returned = "\n".join(f'  due -- "{names.lane_pattern(lane)}" --> {lane}_due' for lane in topology.lanes)
    return f"""flowchart LR
  app(["any AMQP client"])
  requests{{{{"{names.requests}"}}}}
  delays["{lowest} … {highest}<br/>waits of 100 ms, 200 ms, 400 ms, …"]
  due{{{{"{names.due_exchange}"}}}}
  subgraph lanes ["lanes: what is published, and what comes back"]
{queues}
{side}  end
  worker(["workers, a pool a lane"])
  fallen[("{names.strays}")]
  webhooks[("{names.webhooks}")]
  batches[("{names.batches}, {names.tickets}")]
  dead[("{names.dead}")]
  events{{{{"{names.events}"}}}}
  control{{{{"{names.control}"}}}}
  app -- "&lt;lane&gt;.&lt;app&gt;.&lt;task&gt;" --> requests
{published}
  delays -- "when its time has come" --> due
{returned}
  lanes ==> worker
  requests -. "no such lane" .-> fallen
  lanes -. "expired, or delivered too often" .-> fallen
  fallen --> worker
  worker -- "retry, delay" --> delays
{aside}  worker -- "hopeless" --> dead
  worker -- "outcome to post" --> webhooks
  due -- "post again" --> webhooks
  webhooks --> worker
  worker -- "for a provider's batch" --> batches
  due -- "look at the batch again" --> batches
  batches --> worker
  worker -. "life cycle" .-> events
  control -- "cancel, result, status" --> worker
  worker == "answer, by reply_to" ==> app
"""


def _side_queues_of_a_lane(topology: Topology) -> int:
    prefix = Names(topology.namespace).side_prefix
    return sum(exchange.name.startswith(prefix) for exchange in topology.exchanges)


def render(topology: Topology) -> str:
    """List all exchanges, queues and bindings as text. The levels of the delay cascade share a line, and so do the side
    queues of a lane."""
    names = Names(topology.namespace)
    on_one_line = (names.delay_prefix, names.side_prefix)
    cascade = f"{names.delay(0)} … {names.delay(delays.LEVELS - 1)}"
    most_side_queues = _side_queues_of_a_lane(topology)
    side_exchanges = f"{names.side_exchange(0)} … {names.side_exchange(most_side_queues - 1)}"
    lines = [f"RabbitMQ {topology.broker_version}: {topology.note}", "", "exchanges"]
    lines += [
        f"  {_exchange(exchange)}" for exchange in topology.exchanges if not exchange.name.startswith(on_one_line)
    ]
    lines += [f"  {side_exchanges}: topic"] if most_side_queues else []
    lines += [f"  {cascade}: headers", "", "queues"]
    side_queues = tuple(names.side(lane, 0).removesuffix("00") for lane in topology.lanes)
    lines += [
        f"  {queue.name}: {_format_arguments(queue.arguments)}"
        for queue in topology.queues
        if not queue.name.startswith((names.delay_prefix, *side_queues))
    ]
    for prefix in side_queues:
        if queues := [queue for queue in topology.queues if queue.name.startswith(prefix)]:
            lines.append(f"  {queues[0].name} … {queues[-1].name}: {_format_arguments(queues[0].arguments)}")
    wait = dict(topology.queue(names.delay(0)).arguments)
    wait["x-message-ttl"] = f"{delays.wait_ms(0)} … {delays.wait_ms(delays.LEVELS - 1)}"
    wait["x-dead-letter-exchange"] = f"the next lower, at last {names.due_exchange}"
    lines += [f"  {cascade}: {_format_arguments(wait)}", "", "bindings"]
    lines += [f"  {binding.label}" for binding in topology.bindings if not binding.source.startswith(on_one_line)]
    lines += [f"  {side_exchanges}: '<lane>.#' to the lane's side queue of that number"] if most_side_queues else []
    lines += [f"  {cascade}: true to the wait queue, false to the next lower, at last {names.due_exchange}"]
    return "\n".join(lines)


def _exchange(exchange: Exchange) -> str:
    internal = ", internal" if exchange.internal else ""
    arguments = f", {_format_arguments(exchange.arguments)}" if exchange.arguments else ""
    return f"{exchange.name}: {exchange.type}{internal}{arguments}"


def _format_arguments(arguments: Arguments) -> str:
    kind = arguments.get("x-queue-type")
    others = [f"{key.removeprefix('x-')} {value}" for key, value in arguments.items() if key != "x-queue-type"]
    return ", ".join([str(kind), *others] if kind else others)
