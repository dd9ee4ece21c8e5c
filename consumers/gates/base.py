"""A gate: a check before a provider is called. What a gate takes in `enter` (a claim, budget), it gives back in
`leave`."""

from typing import Protocol

from consumers.job import Decoded, Job
from consumers.outcomes import Outcome


class Gate(Protocol):
    """A check that a request passes before a provider is called for it. `leave` is called for every gate that let the
    job pass, whatever its outcome, the last gate first."""

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """Check the job. Return None to let it pass to the next gate, or the outcome of its delivery."""

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Give back what `enter` took. `outcome`: the outcome of the delivery; None if the job was cancelled, because
        its delivery was lost or the worker stops."""
