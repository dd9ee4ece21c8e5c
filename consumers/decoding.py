"""Decodes requests without delaying the event loop: a small body in one step, a larger one in several."""

from functools import partial

from consumers.job import Job
from consumers.reading import Reading
from topology.codec import bounds, decoding
from topology.codec.request import Request
from topology.lanes import LaneSpec, urgency


class Decoding:
    """Makes the request of a job. `values`: the keys and values that a body may have."""

    def __init__(self, reading: Reading, *, values: int = bounds.VALUES) -> None:
        self._reading = reading
        self._values = values

    async def request(self, job: Job, lane: LaneSpec) -> Request:
        """The request of a message. Raises RequestProblem."""
        message = job.message
        if (weight := decoding.weight(message)) <= bounds.SMALL_BYTES:
            rank = (urgency(lane.name), weight)
            return await self._reading.turn(partial(self._decode, job, lane), rank=rank)
        raw = await self._reading.turn(partial(decoding.unpacked, message), rank=(urgency(lane.name), weight))
        return await self.request_of(raw, job, lane)

    async def request_of(self, raw: bytes, job: Job, lane: LaneSpec) -> Request:
        """The request whose body is `raw`, unpacked or fetched. Raises RequestProblem."""
        rank = (urgency(lane.name), len(raw))
        if (excess := await self._reading.excess(raw, values=self._values, rank=rank)) is not None:
            raise decoding.too_large(excess)
        return await self._reading.turn(partial(self._decode, job, lane, raw), rank=rank)

    def _decode(self, job: Job, lane: LaneSpec, raw: bytes | None = None) -> Request:
        return decoding.decode(
            job.message,
            lane=lane,
            request_id=job.id,
            hop=job.hop if job.trusted else None,
            now_ms=job.taken_ms,
            raw=raw,
            values=self._values,
        )
