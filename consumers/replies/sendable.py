"""Brings a request's outcome into a form that can be sent, before the outcome is stored. An answer that is too large
for an AMQP message is stored outside the broker, and the outcome contains its address instead. If the answer cannot be
stored, the outcome becomes an error."""

import json
from dataclasses import replace
from typing import Final

from consumers.bodies.answers import AnswerBodies
from consumers.outcomes import Answered, Buried, Outcome
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.contract.problems import answer_too_large
from topology.codec.bounds import ANSWER_BYTES

SOON_S: Final = 5.0
"""For how many seconds a worker tries to store a large answer outside the broker. If that fails, the answer is sent in
a message, if the broker accepts its size."""
KEEP_WITHIN_S: Final = 60.0
"""If the broker does not accept an answer of this size, a worker tries for this many seconds longer to store it,
because the provider's call was paid for."""


class Sendable:
    """Brings outcomes into a form that can be sent: an answer that is too large for a message is stored beside the
    broker (in `bodies`; None: this is not done). `answer_bytes`: a larger answer ends as an error."""

    def __init__(
        self, publisher: Publisher, *, answer_bytes: int = ANSWER_BYTES, bodies: AnswerBodies | None = None
    ) -> None:
        self._publisher = publisher
        self._answer_bytes = answer_bytes
        self._bodies = bodies

    async def of(self, outcome: Outcome) -> Outcome:
        """The outcome in a form that can be sent: unchanged, with the address of its stored answer, or an error."""
        if not isinstance(outcome, Answered):
            return outcome
        if (size := len(outcome.body)) > self._answer_bytes:
            return Buried(answer_too_large(size, self._answer_bytes, setting="LANEKEEPER_RESULTS__ANSWER_BYTES"))
        bodies = self._bodies
        if bodies is not None and size <= bodies.over_bytes:
            return outcome
        if bodies is None:
            limit = await self._publisher.exceeded_limit(size)
            return outcome if limit is None else Buried(answer_too_large(size, limit, setting="LANEKEEPER_BODIES__URL"))
        kept = await bodies.keep(outcome.body, within_s=SOON_S)
        if kept is None:
            # the broker is asked only now, because the question is a message of that size
            if (limit := await self._publisher.exceeded_limit(size)) is None:
                return outcome
            if (kept := await bodies.keep(outcome.body, within_s=KEEP_WITHIN_S)) is None:
                return Buried(answer_too_large(size, limit, is_away=True))
        return replace(outcome, body=place_of(kept, size), kept=kept)

    def forget(self, outcome: Outcome) -> None:
        """Delete the stored answer of this outcome. It is not used, because the store already had another outcome of
        the request."""
        if self._bodies is not None and isinstance(outcome, Answered) and outcome.kept is not None:
            self._bodies.forget(outcome.kept)


def place_of(kept: BodyAddress, size: int) -> bytes:
    """The body of a reply whose answer of `size` bytes is stored elsewhere: a JSON object with its address, as in
    docs/contract.md."""
    place = {"type": "urn:lanekeeper:body", "address": kept.address, "sha256": kept.sha256, "bytes": size}
    return json.dumps(place).encode()
