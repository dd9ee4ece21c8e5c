"""What most tests declare: the default lanes with fewer side queues, and fewer delay levels.

Side queues and levels are quorum queues that every test makes and deletes. Tests about sharing a lane set their own
number of side queues.
"""

import dataclasses

from topology.lanes import DEFAULT_LANES

SIDE_QUEUES = 1
DELAY_LEVELS = 13
"""Enough for delays of up to 13 minutes. With all 29 a topology costs the broker twice as much CPU time."""
LANES = tuple(dataclasses.replace(lane, side_queues=SIDE_QUEUES) for lane in DEFAULT_LANES)
SETTINGS = {lane.name: {"side_queues": SIDE_QUEUES} for lane in LANES}
ENVIRONMENT = {f"LANEKEEPER_LANES__{lane.name.upper()}__SIDE_QUEUES": str(SIDE_QUEUES) for lane in LANES}
