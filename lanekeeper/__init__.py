"""What an application imports: `from lanekeeper import Client`.

The wire format that clients and workers share is in `contract/`. This package never imports Lanekeeper's packages
`topology`, `consumers` or `service`, because the application may have its own packages with these names.
"""

from typing import TYPE_CHECKING, Any

from lanekeeper.bodies import BodiesFull, BodiesUnavailable, BodyError
from lanekeeper.client import Client
from lanekeeper.contract.messages import Depth
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerBlocked,
    BrokerError,
    BrokerUnreachable,
    ClientMisused,
    ConfirmUnknown,
    InvalidArgument,
    InvalidUrl,
    LanekeeperError,
    PublishRefused,
    Rejected,
    ReplyLost,
    TopologyMismatch,
    Unroutable,
)
from lanekeeper.groups import Group, GroupProgress
from lanekeeper.replies import Cancelled, ControlRefused, Final, NoReply, NotAMessage, NotEnded, Part, Problem
from lanekeeper.requests import Options

if TYPE_CHECKING:
    from lanekeeper.telemetry.tracing import Tracing

__version__ = "0.4.0"
"""Of both distributions, lanekeeper-client and lanekeeper-service."""
__all__ = [
    "AccessRefused", "BodiesFull", "BodiesUnavailable", "BodyError", "BrokerBlocked", "BrokerError",
    "BrokerUnreachable", "Cancelled", "Client", "ClientMisused", "ConfirmUnknown", "ControlRefused", "Depth",
    "Final", "Group", "GroupProgress", "InvalidArgument", "InvalidUrl", "LanekeeperError", "Names", "NoReply",
    "NotAMessage", "NotEnded", "Options", "Part", "Problem", "PublishRefused", "Rejected", "ReplyLost",
    "TopologyMismatch", "Tracing", "Unroutable",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import `Tracing` on first use: it needs OpenTelemetry's API, which an application may do without."""
    if name != "Tracing":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lanekeeper.telemetry.tracing import Tracing

    return Tracing
