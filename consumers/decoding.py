"""Decodes requests without blocking the event loop for long: a small body is decoded in one step, a larger one in
several."""

from functools import partial

from consumers.job import Decoded, Job
from consumers.parsing import Parsing
from consumers.providers.routes import Routes
from topology.codec import bounds, decoding
from topology.lanes import LaneSpec, urgency


class Decoding:
    """Decodes the message of a job (a delivery that is worked on) into its request, and adds the providers that may be
    called for the request. `max_values`: how many JSON keys and values a body may have."""

    def __init__(self, parsing: Parsing, routes: Routes, *, max_values: int = bounds.VALUES) -> None:
        self._parsing = parsing
        self._routes = routes
        self._max_values = max_values

    async def decode(self, job: Job, lane: LaneSpec) -> Decoded:
        """Decode the job's message. Raises RequestProblem if the request is invalid or too large."""
        message = job.message
        rank = (urgency(lane.name), decoding.weight(message))
        if rank[1] <= bounds.SMALL_BYTES:
            return await self._parsing.run(partial(self._decode, job, lane), rank=rank)
        raw = await self._parsing.run(partial(decoding.unpacked, message), rank=rank)
        return await self.decode_body(raw, job, lane)

    async def decode_body(self, raw: bytes, job: Job, lane: LaneSpec) -> Decoded:
        """Like `decode`, but with `raw` in place of the message's body: the body after decompression, or the body that
        was fetched from outside the broker. Raises RequestProblem if the request is invalid or too large."""
        rank = (urgency(lane.name), len(raw))
        if (excess := await self._parsing.excess(raw, max_values=self._max_values, rank=rank)) is not None:
            raise decoding.too_large(excess)
        return await self._parsing.run(partial(self._decode, job, lane, raw), rank=rank)

    def _decode(self, job: Job, lane: LaneSpec, raw: bytes | None = None) -> Decoded:
        request = decoding.decode(
            job.message,
            lane=lane,
            request_id=job.id,
            hop=job.hop if job.trusted else None,
            now_ms=job.taken_ms,
            raw=raw,
            max_values=self._max_values,
        )
        return Decoded(request, lane, self._routes.of(lane.name, job.identity.tenant, request.model))
