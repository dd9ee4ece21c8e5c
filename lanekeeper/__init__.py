"""What an application imports: `from lanekeeper import Client`.

The wire format that clients and workers share is in `contract/`. This package never imports Lanekeeper's packages
`topology`, `consumers` or `service`, because the application may have its own packages with these names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lanekeeper.amqp.connection import Depth
    from lanekeeper.bodies import BodiesFull, BodiesUnavailable, BodyError
    from lanekeeper.client import Client
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
        ReplyLost,
        TopologyMismatch,
        Unroutable,
    )
    from lanekeeper.errors import Cancelled, ControlRefused, NoReply, NotEnded
    from lanekeeper.replies import Final, Part, Problem
    from lanekeeper.requests import Options
    from lanekeeper.telemetry.tracing import Tracing

__version__ = "0.3.0"
"""Of both distributions, lanekeeper-client and lanekeeper-service."""
__all__ = [
    "AccessRefused", "BodiesFull", "BodiesUnavailable", "BodyError", "BrokerBlocked", "BrokerError",
    "BrokerUnreachable", "Cancelled", "Client", "ClientMisused", "ConfirmUnknown", "ControlRefused", "Depth",
    "Final", "InvalidArgument", "InvalidUrl", "LanekeeperError", "Names", "NoReply", "NotEnded", "Options", "Part",
    "Problem", "PublishRefused", "ReplyLost", "TopologyMismatch", "Tracing", "Unroutable",
]  # fmt: skip

_NAMES_OF = {
    "amqp.connection": ("Depth",),
    "bodies": ("BodiesFull", "BodiesUnavailable", "BodyError"),
    "client": ("Client",),
    "contract.names": ("Names",),
    "contract.problems": (
        "AccessRefused", "BrokerBlocked", "BrokerError", "BrokerUnreachable", "ClientMisused", "ConfirmUnknown",
        "InvalidArgument", "InvalidUrl", "LanekeeperError", "PublishRefused", "ReplyLost", "TopologyMismatch",
        "Unroutable",
    ),
    "errors": ("Cancelled", "ControlRefused", "NoReply", "NotEnded"),
    "requests": ("Options",),
    "replies": ("Final", "Part", "Problem"),
    "telemetry.tracing": ("Tracing",),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that code that needs only the contract loads no AMQP client."""
    for module, names in _NAMES_OF.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"lanekeeper.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
