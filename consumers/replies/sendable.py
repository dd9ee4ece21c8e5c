"""Brings a request's outcome into a form that can be sent, before the outcome is stored. If a store for bodies (a
folder or a bucket) is configured, a large answer is stored there, and the outcome contains its address instead. If an
answer is too large for an AMQP message and cannot be stored in this way, the outcome becomes an error."""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Final

from consumers.background import Background
from consumers.outcomes import Answered, Buried, Outcome
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.bodies import KEEP_S, OVER_BYTES, BodiesUnavailable, BodyStore
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.contract.problems import answer_too_large
from lanekeeper.telemetry import logs, signals
from topology.codec.bounds import ANSWER_BYTES

SOON_S: Final = 5.0
"""For how many seconds a worker at first tries to store a large answer outside the broker. If that fails, and the
broker accepts a message of this size, the answer is sent in a message."""
KEEP_WITHIN_S: Final = 60.0
"""If an answer could not be stored outside the broker within `SOON_S`, and the broker does not accept a message of its
size, a worker tries again for this many seconds to store it, because the call to the provider was paid for."""
MARGIN_S: Final = 3600.0
"""A large answer that is stored outside the broker is kept for this many seconds longer than the result that contains
its address, because a client may read the answer some time after it has read the result."""
PAUSE_S: Final = 0.5
"""The pause, in seconds, between two tries to store an answer outside the broker."""
log = logs.logger()


class Sendable:
    """Brings outcomes into a form that can be sent. An answer of more than `over_bytes` is stored in `bodies` (a folder
    or a bucket; None: every answer is sent in a message). It is kept there for `MARGIN_S` longer than `keep_s`, the
    time for which results are kept. An answer of more than `answer_bytes` becomes an error."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        answer_bytes: int = ANSWER_BYTES,
        bodies: BodyStore | None = None,
        over_bytes: int = OVER_BYTES,
        keep_s: float = KEEP_S,
    ) -> None:
        self._publisher = publisher
        self._answer_bytes = answer_bytes
        self._bodies = bodies
        self._over_bytes = over_bytes
        self._keep_s = keep_s
        self._background = Background()

    async def of(self, outcome: Outcome) -> Outcome:
        """Return the outcome in a form that can be sent: unchanged, or with the address of its stored answer instead of
        the answer, or replaced by an error."""
        if not isinstance(outcome, Answered):
            return outcome
        if (size := len(outcome.body)) > self._answer_bytes:
            return Buried(answer_too_large(size, self._answer_bytes, setting="LANEKEEPER_RESULTS__ANSWER_BYTES"))
        bodies = self._bodies
        if bodies is not None and size <= self._over_bytes:
            return outcome
        if bodies is None:
            limit = await self._publisher.exceeded_limit(size)
            return outcome if limit is None else Buried(answer_too_large(size, limit, setting="LANEKEEPER_BODIES__URL"))
        kept = await self._keep(bodies, outcome.body, within_s=SOON_S)
        if kept is None:
            # the broker is asked only now, because it is asked by sending it a message of that size
            if (limit := await self._publisher.exceeded_limit(size)) is None:
                return outcome
            if (kept := await self._keep(bodies, outcome.body, within_s=KEEP_WITHIN_S)) is None:
                return Buried(answer_too_large(size, limit, is_away=True))
        return replace(outcome, body=place_of(kept, size), kept=kept)

    def forget(self, outcome: Outcome) -> None:
        """Begin to delete the answer of this outcome from the store of bodies, because the outcome is not used: the
        store of results already had another outcome of the request. If the process dies before the answer is deleted,
        the answer is removed when it expires."""
        if self._bodies is not None and isinstance(outcome, Answered) and outcome.kept is not None:
            self._background.begin(_drop(self._bodies, outcome.kept), name="drop an answer")

    async def aclose(self, *, within_s: float) -> None:
        await self._background.finish(within_s=within_s)

    async def _keep(self, bodies: BodyStore, body: bytes, *, within_s: float) -> BodyAddress | None:
        """Store an answer durably outside the broker. If the store is unavailable, full or hangs, try again for up to
        `within_s`. Return the answer's address; None if the answer could not be stored."""
        cause = "no answer"
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        return await bodies.keep_answer(body, for_s=self._keep_s + MARGIN_S)
                    except BodiesUnavailable as error:
                        cause = error.cause
                    await asyncio.sleep(PAUSE_S)
        log.warning(signals.ANSWER_UNKEPT, error=cause, within_s=within_s)
        return None


async def _drop(bodies: BodyStore, kept: BodyAddress) -> None:
    with suppress(BodiesUnavailable):
        await bodies.drop_answer(kept)


def place_of(kept: BodyAddress, size: int) -> bytes:
    """The body of the reply if the answer, of `size` bytes, is stored outside the broker: a JSON object with the
    answer's address (`kept`), as docs/contract.md describes it."""
    place = {"type": "urn:lanekeeper:body", "address": kept.address, "sha256": kept.sha256, "bytes": size}
    return json.dumps(place).encode()
