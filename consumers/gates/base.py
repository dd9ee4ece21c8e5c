"""A gate: a check before the provider is called. What it takes in `enter` it gives back in `leave`."""

from typing import Protocol

from consumers.job import Asked, Job
from consumers.outcomes import Outcome


class Gate(Protocol):
    """`enter` lets the job pass (None) or ends its delivery with an outcome; `leave` is called, in reverse order, for
    every gate that let it pass, whatever the outcome."""

    async def enter(self, job: Job, asked: Asked) -> Outcome | None: ...

    async def leave(self, job: Job, asked: Asked, outcome: Outcome | None) -> None:
        """`outcome` is None if the delivery was lost or the worker stops: then nothing is known."""
