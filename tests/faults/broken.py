"""`python -m tests.faults.broken COMMAND …` runs `lanekeeper COMMAND …` with a deliberate error: it acknowledges
first.

A check that looks for lost requests must find some with this worker.
"""

import sys
from typing import Any

from consumers.job import Job
from consumers.pool import Pool
from service.cli.main import run
from topology.broker.consume import Delivery

_work = Pool._work


class _Acknowledged:
    """A delivery that was acknowledged already."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def __getattr__(self, name: str) -> Any:
        return getattr(self._delivery, name)

    async def ack(self) -> None: ...

    async def reject(self) -> None: ...

    async def nack(self) -> None: ...


async def acknowledge_first(self: Pool, job: Job) -> None:
    await job.delivery.ack()
    job.delivery = _Acknowledged(job.delivery)  # type: ignore[assignment]
    await _work(self, job)


if __name__ == "__main__":
    Pool._work = acknowledge_first  # type: ignore[method-assign]
    sys.exit(run(sys.argv[1:]))
