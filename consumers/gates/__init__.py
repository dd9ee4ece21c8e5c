"""The checks before a call, in order: deadline, schedule, brake, claim, body, route, daily caps, budget."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from consumers.job import Decoded, Job
from consumers.outcomes import Outcome

Enter = Callable[[Job, Decoded], Awaitable[Outcome | None]]
Leave = Callable[[Job, Decoded, Outcome | None], Awaitable[None]]


class Gate(NamedTuple):
    """A check before a call to a provider."""

    enter: Enter
    """Returns None if the job may pass to the next gate; otherwise the outcome with which its delivery ends here."""
    leave: Leave | None = None
    """Gives back what `enter` took. It is called for every gate that let the request pass, in reverse order, whatever
    the outcome; that is None if the job was cancelled, because its delivery was lost or the worker stops."""
