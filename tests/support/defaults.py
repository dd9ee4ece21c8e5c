"""What tests set unless they say otherwise: the default lanes with fewer side queues and without batches, fewer delay
levels, and a store for each virtual host, which all its workers share, as on one machine.

Side queues and levels are quorum queues that every test makes and deletes. Tests about sharing a lane set their own
number of side queues."""

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topology.lanes import DEFAULT_LANES, BatchSpec

SIDE_QUEUES = 1
DELAY_LEVELS = 13
"""Enough for delays of up to 13 minutes. With all 29 a topology costs the broker twice as much CPU time."""
LANES = tuple(dataclasses.replace(lane, side_queues=SIDE_QUEUES, batches=BatchSpec()) for lane in DEFAULT_LANES)
SETTINGS = {lane.name: {"side_queues": SIDE_QUEUES, "batches": {"enabled": False}} for lane in LANES}
ENVIRONMENT = {
    **{f"LANEKEEPER_LANES__{lane.name.upper()}__SIDE_QUEUES": str(SIDE_QUEUES) for lane in LANES},
    "LANEKEEPER_LANES__BATCH__BATCHES__ENABLED": "false",
}


_folders: list[Path] = []


@contextmanager
def stores() -> Iterator[None]:
    """New, empty stores for as long as the block lasts; deleted at its end."""
    folder = Path(tempfile.mkdtemp(prefix="lanekeeper-stores-"))
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.remove(folder)
        shutil.rmtree(folder, ignore_errors=True)


def store_url(amqp_url: str | None) -> str:
    name = "".join(each if each.isalnum() else "-" for each in amqp_url or "none")[-80:]
    return f"sqlite:///{_folders[-1] / name}.sqlite"
