"""The errors that `Client` raises, besides `Problem` (replies.py) and the broker's errors (contract/problems.py)."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias

from lanekeeper.contract.problems import LanekeeperError

Cancelled: TypeAlias = Literal["recorded", "told", "ended", "unseen"]
"""What a cancellation did. `recorded`: the request was waiting, and will end as cancelled. `told`: the request is
running, and its worker got the cancellation and will stop it. `ended`: the request had ended before the cancellation
came. `unseen`: no worker knows the request; if a worker receives it within the longest deadline of all lanes, it ends
as cancelled."""


class NoReply(LanekeeperError):
    """No final reply to a request, or no worker's answer to a control message, came in time."""


class ControlRefused(LanekeeperError):
    """A worker refused a control message, for example because the id is not valid or the tenant not allowed."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.fields = document
        """The fields of the problem document, as received."""
        super().__init__(f"refused by the worker: {document.get('detail', 'no detail')}")

    @property
    def is_passing(self) -> bool:
        """Whether the control message was refused only because the tenant has sent too many of them: the same message
        may be accepted later."""
        return bool(self.fields.get("retryable"))


class NotEnded(LanekeeperError):
    """The request has no result yet. `status` says whether it is `running` or `waiting`, or `unknown` to the
    workers."""

    def __init__(self, id: str, status: str, *, attempts: int = 0, due_at: str | None = None) -> None:
        self.id = id
        self.status = status
        self.attempts = attempts
        """How many attempts to call the provider have ended; one that runs now is not counted."""
        self.due_at = None if due_at is None else datetime.fromisoformat(due_at)
        """The earliest time at which the next attempt starts; None if this time is not known."""
        super().__init__(
            f"request {id} has no result yet: {status}, {self._hint()}; to wait: lanekeeper result --wait 20s {id}"
        )

    def _hint(self) -> str:
        match self.status:
            case "running":
                return "a worker is at it"
            case "waiting":
                when = "" if self.due_at is None else f", due at {self.due_at.isoformat(timespec='seconds')}"
                made = f"attempt {self.attempts} was made, it waits for the next" if self.attempts else "not begun yet"
                return f"{made}{when}"
            case "unknown":
                return "no worker has seen it: it waits in its lane, was never published, or ended too long ago"
            case _:
                return "ask again later"


def no_answer(id: str, timeout_s: float | None) -> NoReply:
    """Make the error to raise if a request was not answered in time."""
    return NoReply(
        f"no answer to {id} within {timeout_s:g} s; it may still come, and is kept: lanekeeper result {id}. "
        "Is a worker running? Ask: lanekeeper status"
    )
