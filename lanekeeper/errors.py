"""The errors that `Client` raises, besides `Problem` (replies.py) and the broker's errors (contract/problems.py)."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias

from lanekeeper.contract.problems import LanekeeperError

Cancelled: TypeAlias = Literal["recorded", "told", "ended", "unseen"]
"""`recorded`: it was waiting, and will end as cancelled. `told`: it runs, and its worker will stop it. `ended`: it had
ended before. `unseen`: no worker knows it; if one gets it within the longest deadline, it ends as cancelled."""


class NoReply(LanekeeperError):
    """No final reply, or no worker's answer to a control message, came in time."""

    message_id: str | None = None


class ControlRefused(LanekeeperError):
    """A worker refused a control message. `fields`: the problem document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.fields = document
        super().__init__(f"refused by the worker: {document.get('detail', 'no detail')}")

    @property
    def is_passing(self) -> bool:
        """Whether the tenant only sent too many: it may be accepted later."""
        return bool(self.fields.get("retryable"))


class NotEnded(LanekeeperError):
    """The request has no result yet: it is `running`, `waiting` or `unknown` to the workers."""

    def __init__(self, id: str, status: str, *, attempts: int = 0, due_at: str | None = None) -> None:
        self.id = id
        self.status = status
        self.attempts = attempts
        self.due_at = None if due_at is None else datetime.fromisoformat(due_at)
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
    """Not answered in time."""
    error = NoReply(
        f"no answer to {id} within {timeout_s:g} s; it may still come, and is kept: lanekeeper result {id}. "
        "Is a worker running? Ask: lanekeeper status"
    )
    error.message_id = id
    return error
