"""A gate: a check before a provider is called. What a gate takes for a request in `enter`, such as a part of a
provider's budget, it gives back in `leave`."""

from typing import Protocol

from consumers.job import Decoded, Job
from consumers.outcomes import Outcome


class Gate(Protocol):
    """A check that a request passes before a provider is called for it. After the job, whatever its outcome, `leave` is
    called for every gate that let it pass, in reverse order."""

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """Check the job. Return None to let it pass to the next gate; otherwise the outcome with which its delivery
        ends at this gate."""

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Give back what `enter` took. `outcome`: the outcome of the delivery; None if the job was cancelled, because
        its delivery was lost or the worker stops."""
