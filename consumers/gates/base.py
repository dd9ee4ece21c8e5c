"""Defines `Gate`, a check that a request must pass before a provider is called for it. What a gate takes for a request
in `enter`, such as a part of a provider's budget, it gives back in `leave`."""

from typing import Protocol

from consumers.job import Decoded, Job
from consumers.outcomes import Outcome


class Gate(Protocol):
    """A check that a request must pass before a provider is called for it. When work on the request ends, whatever its
    outcome, `leave` is called for every gate that let the request pass, in reverse order."""

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """Check the job. Return None if the job may pass to the next gate; otherwise return the outcome with which its
        delivery ends here."""

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Give back what `enter` took. `outcome`: the outcome of the delivery; None if the job was cancelled, because
        its delivery was lost or the worker stops."""
