"""The lanes for tests: the default lanes, with fewer side queues.

Each side queue is a quorum queue that every test makes and deletes. Tests about sharing a lane set their own number.
"""

import dataclasses

from topology.lanes import DEFAULT_LANES

SIDE_QUEUES = 1
LANES = tuple(dataclasses.replace(lane, side_queues=SIDE_QUEUES) for lane in DEFAULT_LANES)
SETTINGS = {lane.name: {"side_queues": SIDE_QUEUES} for lane in LANES}
ENVIRONMENT = {f"LANEKEEPER_LANES__{lane.name.upper()}__SIDE_QUEUES": str(SIDE_QUEUES) for lane in LANES}
