"""Decodes requests without blocking the event loop for long: a small body in one step, a larger one in several."""

from functools import partial

from consumers.job import Job
from consumers.parsing import Parsing
from topology.codec import bounds, decoding
from topology.codec.request import Request
from topology.lanes import LaneSpec, urgency


class Decoding:
    """Decodes the message of a job into its request. `max_values`: how many keys and values a body may have."""

    def __init__(self, parsing: Parsing, *, max_values: int = bounds.VALUES) -> None:
        self._parsing = parsing
        self._max_values = max_values

    async def request(self, job: Job, lane: LaneSpec) -> Request:
        """Decode the job's message into a request. Raises RequestProblem if it is invalid or too large."""
        message = job.message
        if (weight := decoding.weight(message)) <= bounds.SMALL_BYTES:
            rank = (urgency(lane.name), weight)
            return await self._parsing.run(partial(self._decode, job, lane), rank=rank)
        raw = await self._parsing.run(partial(decoding.unpacked, message), rank=(urgency(lane.name), weight))
        return await self.request_of(raw, job, lane)

    async def request_of(self, raw: bytes, job: Job, lane: LaneSpec) -> Request:
        """Like `request`, but with the body `raw`, which was unpacked or fetched, in place of the message's own. Raises
        RequestProblem if it is invalid or too large."""
        rank = (urgency(lane.name), len(raw))
        if (excess := await self._parsing.excess(raw, max_values=self._max_values, rank=rank)) is not None:
            raise decoding.too_large(excess)
        return await self._parsing.run(partial(self._decode, job, lane, raw), rank=rank)

    def _decode(self, job: Job, lane: LaneSpec, raw: bytes | None = None) -> Request:
        return decoding.decode(
            job.message,
            lane=lane,
            request_id=job.id,
            hop=job.hop if job.trusted else None,
            now_ms=job.taken_ms,
            raw=raw,
            max_values=self._max_values,
        )
