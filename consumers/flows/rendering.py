"""Has the templates of pipelines filled in, in processes of their own: a template may take a second, and the worker's
loop runs everybody's requests. What such a process does is in `templates.py`."""

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from consumers.flows.pool_worker import ANSWERED, RUN_BYTES, UNSENDABLE, unpacked
from consumers.flows.process_pool import NotImported, ProcessDied, ProcessPool
from lanekeeper.contract.problems import RequestProblem
from topology.lanes import MIB

MEMORY_BYTES: Final = 256 * MIB
"""Of address space for one process, which takes 27 MiB itself. The state of a pipeline has up to 8 MiB."""
ENDS_AFTER_S: Final = 4
"""A process whose call takes so much CPU time is ended: a function in C does not notice the limit in `templates.py`."""
PROCESSES: Final = 2
"""Enough for thousands of templates a second; and while one is filled in slowly, other tenants use the second."""
_RUN: Final = "consumers.flows.templates:fill_in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is wanted of a pipeline's state, of which `each` and `prompt` are templates."""

    prompt: str = ""
    value: str = ""
    """Without `prompt`: the JSON of the input or output of this name."""
    each: str = ""
    """What a fan-out goes over; `prompt` and `value` may then be of its `item`."""
    numbers: Sequence[int] = ()
    """Of the items, from 0."""


class RenderingUnavailable(Exception):
    """No process could be started, or imported what it needs, in time: a fault of the machine, and of no request."""


class Filled(NamedTuple):
    """What became of an order."""

    texts: list[bytes]
    """Of a fan-out: those of the first of its `numbers`, and not always of all."""
    items: int
    """How many items a fan-out has."""


class Rendering:
    """`urgent_rank`: see `ProcessPool`."""

    def __init__(self, *, urgent_rank: int | None = None) -> None:
        self._pool = ProcessPool(PROCESSES, urgent_rank=urgent_rank, memory_bytes=MEMORY_BYTES, cpu_s=ENDS_AFTER_S)

    async def fill_in(self, order: Order, state: bytes, *, rank: int, tenant: str) -> Filled:
        """Raises RequestProblem, RenderingUnavailable."""
        call = json.dumps(asdict(order)).encode() + b"\n" + state
        try:
            results = await self._twice(call, rank=rank, tenant=tenant)
        except ProcessDied as died:
            raise RequestProblem("invalid_request", _why(died)) from None
        except NotImported as error:
            raise RenderingUnavailable(str(error)) from None
        (kind, text), texts = results[0], [text for _, text in results[1:]]
        if kind == ANSWERED:
            return Filled(texts, int(text))
        if kind == UNSENDABLE:
            raise RequestProblem("too_large", text.decode())
        raise RequestProblem("invalid_request", text.decode())

    async def _twice(self, call: bytes, *, rank: int, tenant: str) -> list[tuple[bytes, bytes]]:
        try:
            return await self._once(call, rank=rank, tenant=tenant)
        except ProcessDied as died:
            if died.code == -signal.SIGXCPU:
                raise
        except NotImported:
            pass
        return await self._once(call, rank=rank, tenant=tenant)  # it may have died of what others have left behind

    async def _once(self, call: bytes, *, rank: int, tenant: str) -> list[tuple[bytes, bytes]]:
        async with self._pool.process(_RUN, rank=rank, tenant=tenant) as process:
            kind, text = await process.call(_RUN, call, most_bytes=0, kind=RUN_BYTES)
        return unpacked(text) if kind == ANSWERED else [(kind, text)]

    async def aclose(self) -> None:
        await self._pool.aclose()


def _why(died: ProcessDied) -> str:
    from consumers.flows.templates import DOES_NOT_FIT, LATE, OUT_OF_MEMORY  # the worker itself needs no Jinja

    if died.code == -signal.SIGXCPU:
        return DOES_NOT_FIT + LATE
    if died.code == OUT_OF_MEMORY:
        return f"{DOES_NOT_FIT}it takes more than {MEMORY_BYTES // MIB} MiB of memory; give it less input"
    return f"{DOES_NOT_FIT}the process that filled it in died ({died}); give it less input"
