"""Runs `lanekeeper` without counting or timing anything for metrics and status. The difference to a normal run is the
cost of metrics.

python -m benchmarks.unmeasured serve
"""

from typing import Any
from unittest.mock import patch

from consumers.providers.registry import CallFigures
from consumers.slots.activity import LaneActivity
from lanekeeper.telemetry.figures import Histogram


def nothing(*_: Any, **__: Any) -> None:
    """In place of what counts."""


if __name__ == "__main__":
    from service.cli.main import main

    with (
        patch.object(Histogram, "add", nothing),
        patch.object(CallFigures, "count", nothing),
        patch.object(LaneActivity, "record", nothing),
    ):
        main()
