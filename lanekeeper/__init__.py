"""What an application imports: `from lanekeeper import Client`.

Also what both ends of the wire agree on (`contract/`). Imports nothing of `topology`, `consumers` or `service`: an
application may have packages of these names itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lanekeeper.amqp.depth import Depth
    from lanekeeper.client import Client
    from lanekeeper.contract.names import Names
    from lanekeeper.contract.problems import (
        AccessRefused,
        BrokerBlocked,
        BrokerError,
        BrokerUnreachable,
        ConfirmUnknown,
        LanekeeperError,
        PublishRefused,
        TopologyMismatch,
        Unroutable,
    )
    from lanekeeper.control import Cancelled, ControlRefused, NoReply, NotEnded
    from lanekeeper.options import Options
    from lanekeeper.replies import Final, Part, Problem
    from lanekeeper.reply_queue import ReplyLost
    from lanekeeper.telemetry.tracing import Tracing

__all__ = [
    "AccessRefused",
    "BrokerBlocked",
    "BrokerError",
    "BrokerUnreachable",
    "Cancelled",
    "Client",
    "ConfirmUnknown",
    "ControlRefused",
    "Depth",
    "Final",
    "LanekeeperError",
    "Names",
    "NoReply",
    "NotEnded",
    "Options",
    "Part",
    "Problem",
    "PublishRefused",
    "ReplyLost",
    "TopologyMismatch",
    "Tracing",
    "Unroutable",
]  # fmt: skip

_HOMES = (
    "lanekeeper.contract.problems",
    "lanekeeper.contract.names",
    "lanekeeper.client",
    "lanekeeper.control",
    "lanekeeper.options",
    "lanekeeper.replies",
    "lanekeeper.reply_queue",
    "lanekeeper.amqp.depth",
    "lanekeeper.telemetry.tracing",
)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: who needs only the contract loads no AMQP client."""
    if name in __all__:
        for home in _HOMES:
            if hasattr(module := import_module(home), name):
                globals()[name] = found = getattr(module, name)
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
