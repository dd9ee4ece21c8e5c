"""Records what applications sent and received, which calls the provider got, and which faults were active.

Append-only; in a file, a line of JSON an event. Times are `time.monotonic()`, which all processes of
a machine share. `checker.py` judges it.
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal

Told = Literal["confirmed", "refused", "returned", "unknown"]
"""The result of one publish: `refused` by a nack, `returned` as unroutable, `unknown` without a confirm."""
OK = "ok"
"""The code of an outcome that is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An application expects an answer, identified by its correlation id."""

    at_s: float
    question: str
    """The correlation id."""
    identity: str
    """The message id: several questions may share it."""
    lane: str
    words: str
    """Words that an `ok` answer must contain."""
    expects: tuple[str, ...] = (OK,)
    """Codes of the correct outcomes."""
    heard: bool = True
    """False if no reply is possible: its outcome is fetched at the end."""
    due_s: float = 0.0
    """If delayed: not to be answered before this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One publish of a request has ended."""

    at_s: float
    question: str
    sent_s: float
    told: Told


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied:
    """A final reply arrived."""

    at_s: float
    question: str
    identity: str
    """The header `x-lane-request-id`."""
    code: str
    """`ok`, or the problem's."""
    digest: str
    """Digest of the body: equal answers have equal bytes."""
    text: str
    """The beginning of an `ok` answer's text."""
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A dead letter was seen."""

    at_s: float
    identity: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """The provider was called. `outcome`: `ok`, `client_gone`, `running`, or the fault."""

    at_s: float
    ended_s: float | None
    identity: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """A fault was caused, lasted and was repaired."""

    at_s: float
    healed_s: float
    code: str
    """In the catalogue: `A1`."""
    title: str
    against: str
    in_flight: int
    """Requests that were confirmed and not answered when it began."""


Event = Asked | Published | Replied | Parked | Called | Disturbed


class History:
    """Events in the order in which they were noticed."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.events.append(event)


def as_line(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **asdict(event)})
