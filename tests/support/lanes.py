"""The lanes as tests have them: as users have them, with fewer side queues.

Each is a quorum queue that is made and deleted with every test. What is about sharing a lane says how many it needs.
"""

import dataclasses

from topology.lanes import DEFAULT_LANES

SIDE_QUEUES = 1
LANES = tuple(dataclasses.replace(lane, side_queues=SIDE_QUEUES) for lane in DEFAULT_LANES)
SETTINGS = {lane.name: {"side_queues": SIDE_QUEUES} for lane in LANES}
ENVIRONMENT = {f"LANEKEEPER_LANES__{lane.name.upper()}__SIDE_QUEUES": str(SIDE_QUEUES) for lane in LANES}
