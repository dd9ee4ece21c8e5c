"""Defines `Worker`, which holds all parts of a worker process."""

from collections.abc import Mapping
from dataclasses import dataclass

from consumers.capacity.activity import LaneActivity
from consumers.capacity.pausing import Pausing
from consumers.capacity.scaling import Scaling
from consumers.claiming import Claiming
from consumers.control.answer import Answers
from consumers.control.queue import Control
from consumers.dead_letters import DeadLetters
from consumers.fairness.lane_slots import LaneSlots
from consumers.fairness.scouting import Scouting
from consumers.parking import Parking
from consumers.pool import Pool
from consumers.replies.reply_retries import ReplyRetries
from consumers.state.following import FollowedStore
from lanekeeper.amqp.connection import Connection
from lanekeeper.bodies import BodyStore
from lanekeeper.contract.names import Names
from service.worker.budgeting import Budgeting
from topology.broker.admin.watch import TopologyWatch
from topology.lanes import LaneSpec
from topology.model import Topology


@dataclass(frozen=True, slots=True)
class Worker:
    """All parts of a worker process, created and connected to each other. `running.run` runs it."""

    names: Names
    lanes: tuple[LaneSpec, ...]
    topology: Topology
    consuming: Connection
    publishing: Connection
    store: FollowedStore
    bodies: BodyStore | None
    claiming: Claiming
    control: Control
    answers: Answers
    parking: Parking
    dead_letters: DeadLetters
    reply_retries: ReplyRetries
    pausing: Pausing
    watch: TopologyWatch
    pools: tuple[Pool, ...]
    scaling: Scaling
    scouting: Scouting
    lane_slots: Mapping[str, LaneSlots]
    """The slots of each lane (how many requests it may work on at a time), by the lane's name."""
    budgeting: Budgeting
    simulated: bool
    """Whether a simulated provider answers the requests, so that their calls cost nothing."""
    activities: tuple[LaneActivity, ...]

    @property
    def version(self) -> str:
        return self.publishing.version

    def reasons(self) -> Mapping[str, str | None]:
        """The parts that must work before the worker takes requests, each with a text that says what is wrong with it,
        or None if nothing is wrong."""
        return {
            "consume connection": self.consuming.trouble,
            "publish connection": self.publishing.trouble or self.publishing.blocked,
            "topology": self.watch.trouble,
            "store": self.store.trouble,
            "control queue": self.control.trouble,
            **{f"queue {pool.queue}": pool.trouble for pool in self.pools},
        }
