"""A topology for people: Mermaid for the README, an outline for the terminal."""

from lanekeeper.contract.names import Names
from topology import delays
from topology.model import Arguments, Exchange, Queue, Topology

_FLOW = """\
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
  worker -. "life cycle" .-> events
  control -- "cancel, result, status" --> worker
  worker == "answer, by reply_to" ==> app"""


def mermaid(topology: Topology) -> str:
    """Draw the ways of a message as a Mermaid flowchart, with the delay cascade as one node."""
    names = Names(topology.namespace)
    lowest, highest = names.delay(0), names.delay(delays.LEVELS - 1)
    queues = "\n".join(
        f'    {lane}[("{names.intake(lane)}")]\n    {lane}_due[("{names.due(lane)}")]' for lane in topology.lanes
    )
    side, aside = "", ""
    if most := _side_queues(topology):
        every = names.side("&lt;lane&gt;", 0), names.side("&lt;lane&gt;", most - 1)
        side = f'    side[("{every[0]} … {every[1]}")]\n'
        aside = '  worker -- "set aside, by tenant" --> side\n'
    flow = _FLOW.format(
        aside=aside,
        published="\n".join(f'  requests -- "{names.lane_pattern(lane)}" --> {lane}' for lane in topology.lanes),
        returned="\n".join(f'  due -- "{names.lane_pattern(lane)}" --> {lane}_due' for lane in topology.lanes),
    )
    return f"""flowchart LR
  app(["any AMQP client"])
  requests{{{{"{names.requests}"}}}}
  delays["{lowest} … {highest}<br/>waits of 100 ms, 200 ms, 400 ms, …"]
  due{{{{"{names.due_exchange}"}}}}
  subgraph lanes ["lanes: what is published, and what comes back"]
{queues}
{side}  end
  worker(["workers, a pool a lane"])
  fallen[("{names.fallen}")]
  dead[("{names.dead}")]
  events{{{{"{names.events}"}}}}
  control{{{{"{names.control}"}}}}
{flow}
"""


def _side_queues(topology: Topology) -> int:
    """The largest number of side queues of any lane."""
    prefix = Names(topology.namespace).side_prefix
    return sum(each.name.startswith(prefix) for each in topology.exchanges)


def render(topology: Topology) -> str:
    """List everything, one line each; the delay levels take one line, and so do each lane's side queues."""
    names = Names(topology.namespace)
    folded = (names.delay_prefix, names.side_prefix)
    cascade = f"{names.delay(0)} … {names.delay(delays.LEVELS - 1)}"
    most = _side_queues(topology)
    sides = f"{names.side_exchange(0)} … {names.side_exchange(most - 1)}"
    lines = [f"RabbitMQ {topology.broker_version}: {topology.note}", "", "exchanges"]
    lines += [f"  {_exchange(each)}" for each in topology.exchanges if not each.name.startswith(folded)]
    lines += [f"  {sides}: topic"] if most else []
    lines += [f"  {cascade}: headers", "", "queues"]
    by_lane: dict[str, list[Queue]] = {}
    for queue in topology.queues:
        for lane in topology.lanes:
            if queue.name.startswith(names.side(lane, 0).removesuffix("00")):
                by_lane.setdefault(lane, []).append(queue)
    of_sides = {queue.name for queues in by_lane.values() for queue in queues}
    lines += [
        f"  {_queue(each)}"
        for each in topology.queues
        if not each.name.startswith(names.delay_prefix) and each.name not in of_sides
    ]
    lines += [f"  {each[0].name} … {each[-1].name}: {_listed(each[0].arguments)}" for each in by_lane.values()]
    wait = dict(topology.queue(names.delay(0)).arguments)
    wait["x-message-ttl"] = f"{delays.wait_ms(0)} … {delays.wait_ms(delays.LEVELS - 1)}"
    wait["x-dead-letter-exchange"] = f"the next lower, at last {names.due_exchange}"
    lines += [f"  {cascade}: {_listed(wait)}", "", "bindings"]
    lines += [f"  {each.label}" for each in topology.bindings if not each.source.startswith(folded)]
    lines += [f"  {sides}: '<lane>.#' to the lane's side queue of that number"] if most else []
    lines += [f"  {cascade}: true to the wait queue, false to the next lower, at last {names.due_exchange}"]
    return "\n".join(lines)


def _exchange(exchange: Exchange) -> str:
    internal = ", internal" if exchange.internal else ""
    arguments = f", {_listed(exchange.arguments)}" if exchange.arguments else ""
    return f"{exchange.name}: {exchange.type}{internal}{arguments}"


def _queue(queue: Queue) -> str:
    return f"{queue.name}: {_listed(queue.arguments)}"


def _listed(arguments: Arguments) -> str:
    """Arguments without their `x-`, the queue's type first."""
    kind = arguments.get("x-queue-type")
    others = [f"{key.removeprefix('x-')} {value}" for key, value in arguments.items() if key != "x-queue-type"]
    return ", ".join([str(kind), *others] if kind else others)
