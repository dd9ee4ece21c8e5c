"""Decodes requests without blocking the event loop for long: small bodies at once, larger ones in several steps, one at
a time and for at most half of the time.

Each step is short (`topology/codec/bounds.py`), but many bodies can arrive at once.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Final, TypeVar

from consumers.job import Chain, Decoded, Job
from topology.codec import bounds, decoding
from topology.lanes import LaneSpec

T = TypeVar("T")
AT_ONCE_S: Final = 0.01
"""A process that has parsed for this many seconds pauses, so that other tasks run. While it does not parse, the time
for which it may parse next grows again, up to this value, which is enough for about twenty bodies of 100 KB."""
TINY_BYTES: Final = 4096
"""A body up to this size is parsed at once, without waiting for others, because that takes at most a millisecond,
whatever the body contains."""
_WITHIN_LIMITS: Final = ""


@dataclass(slots=True, eq=False)
class Decoding:
    """Decodes the message of a job into its request, and adds the providers that may be called for the request
    (`chain_of`: by lane, tenant, model and dialect). `forbidden_to`: why a tenant may not use a model that its request
    names for the provider to ask. `max_values`: how many JSON keys and values a body may have."""

    parsing: "Parsing"
    chain_of: Callable[[str, str, str, str], Chain]
    _: KW_ONLY
    forbidden_to: Callable[[str, str], str] = lambda _, __: ""
    max_values: int = bounds.VALUES
    handlers: Collection[str] = ()
    pipelines: Collection[str] = ()

    async def decode(self, job: Job, lane: LaneSpec) -> Decoded:
        """Raises RequestProblem if the request is invalid or too large."""
        if job.delivery.cut_bytes:
            raise decoding.larger_than_allowed(job.delivery.cut_bytes)
        rank = (lane.rank, decoding.weight(job.message))
        is_state = job.hop.flow is not None and job.hop.flow.input_bytes > 0
        if is_state or rank[1] <= bounds.SMALL_BYTES:
            return await self.parsing.run(partial(self._decode, job, lane), rank=rank)
        raw = await self.parsing.run(partial(decoding.unpacked, job.message), rank=rank)
        return await self.decode_body(raw, job, lane)

    async def decode_body(self, raw: bytes, job: Job, lane: LaneSpec) -> Decoded:
        """Like `decode`, but with `raw` in place of the message's body: the body after decompression, or the body that
        was fetched from outside the broker. Raises RequestProblem if the request is invalid or too large."""
        rank = (lane.rank, len(raw))
        if (excess := await self.parsing.excess(raw, max_values=self.max_values, rank=rank)) is not None:
            raise decoding.too_large(excess)
        return await self.parsing.run(partial(self._decode, job, lane, raw), rank=rank)

    def _decode(self, job: Job, lane: LaneSpec, raw: bytes | None = None) -> Decoded:
        request = decoding.decode(
            job.message,
            lane=lane,
            request_id=job.id,
            hop=job.hop if job.trusted else None,
            now_ms=job.taken_ms,
            raw=raw,
            max_values=self.max_values,
            handlers=self.handlers,
            pipelines=self.pipelines,
        )
        if request.handler or request.pipeline:
            return Decoded(request, lane, Chain())
        tenant = job.identity.tenant
        chain = self.chain_of(lane.name, tenant, request.model, request.dialect)
        if forbidden := next(filter(None, (self.forbidden_to(tenant, each) for each in request.other_models)), ""):
            chain = Chain(forbidden=forbidden)
        return Decoded(request, lane, chain.in_fast_mode() if request.is_fast else chain)


class Parsing:
    """Runs the steps in which this process parses large JSON bodies, one step at a time, with pauses between them for
    the event loop. If several steps wait, the one with the lowest `rank` runs first: the rank of the lane,
    then the size of the body in bytes."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_s = AT_ONCE_S
        self._at_s = clock()
        self._is_taken = False
        self._waiting: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def run(self, work: Callable[[], T], *, rank: tuple[int, int]) -> T:
        """Run `work`, one step of parsing, and return its result. A body of at most `TINY_BYTES` is parsed at once; a
        larger one waits for the running step, the pause after it, and all waiting steps with a lower rank."""
        if rank[1] <= TINY_BYTES:
            return work()
        if self._is_taken:
            await self._wait(rank)
        self._is_taken = True
        began_s = self._clock()
        collects = gc.isenabled()
        gc.disable()  # parsing creates many objects; the collections that they start take longer than the parsing
        try:
            return work()
        finally:
            if collects:
                gc.enable()
            self._pass_on(began_s, self._clock())

    async def excess(self, raw: bytes, *, max_values: int, rank: tuple[int, int]) -> str | None:
        """Return a text that names the limit which the body exceeds (see `bounds.excess`); None if it exceeds none. A
        large body is checked in steps, so that other work can run between them."""
        steps = bounds.excess_in_steps(raw, max_values=max_values)
        while True:
            found = await self.run(lambda: next(steps, _WITHIN_LIMITS), rank=rank)
            if found is not None:
                return None if found == _WITHIN_LIMITS else found

    async def _wait(self, rank: tuple[int, int]) -> None:
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (rank, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _pass_on(self, began_s: float, ended_s: float) -> None:
        self._left_s = min(AT_ONCE_S, self._left_s + began_s - self._at_s) - (ended_s - began_s)
        self._at_s = ended_s
        if self._left_s >= 0 and not self._waiting:
            self._is_taken = False
        else:
            asyncio.get_running_loop().call_later(max(0.0, -self._left_s), self._next)

    def _next(self) -> None:
        self._is_taken = False
        while self._waiting:
            *_, turn = heappop(self._waiting)
            if not turn.done():
                self._is_taken = True
                turn.set_result(None)
                return
