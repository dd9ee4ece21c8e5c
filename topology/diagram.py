"""A topology for people: Mermaid for the README, an outline for the terminal."""

from topology import delays
from topology.model import Arguments, Exchange, Queue, Topology
from topology.names import Names

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
  worker -- "hopeless" --> dead
  worker -. "life cycle" .-> events
  control -- "cancel, result, status" --> worker
  worker == "answer, by reply_to" ==> app"""


def mermaid(topology: Topology) -> str:
    """Draw the ways that a message can go, as a Mermaid flowchart; the delay cascade is folded into one node."""
    names = Names(topology.namespace)
    lowest, highest = names.delay(0), names.delay(delays.LEVELS - 1)
    queues = "\n".join(
        f'    {lane}[("{names.intake(lane)}")]\n    {lane}_due[("{names.due(lane)}")]' for lane in topology.lanes
    )
    flow = _FLOW.format(
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
  end
  worker(["workers, a pool a lane"])
  fallen[("{names.fallen}")]
  dead[("{names.dead}")]
  events{{{{"{names.events}"}}}}
  control{{{{"{names.control}"}}}}
{flow}
"""


def render(topology: Topology) -> str:
    """List all of it, a line each, the levels of the delay cascade folded into one."""
    names = Names(topology.namespace)
    cascade = f"{names.delay(0)} … {names.delay(delays.LEVELS - 1)}"
    lines = [f"RabbitMQ {topology.broker_version}: {topology.note}", "", "exchanges"]
    lines += [f"  {_exchange(each)}" for each in topology.exchanges if not each.name.startswith(names.delay_prefix)]
    lines += [f"  {cascade}: headers", "", "queues"]
    lines += [f"  {_queue(each)}" for each in topology.queues if not each.name.startswith(names.delay_prefix)]
    wait = dict(topology.queue(names.delay(0)).arguments)
    wait["x-message-ttl"] = f"{delays.wait_ms(0)} … {delays.wait_ms(delays.LEVELS - 1)}"
    wait["x-dead-letter-exchange"] = f"the next lower, at last {names.due_exchange}"
    lines += [f"  {cascade}: {_listed(wait)}", "", "bindings"]
    lines += [f"  {each.label}" for each in topology.bindings if not each.source.startswith(names.delay_prefix)]
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
