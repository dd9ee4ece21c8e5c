"""What a tenant may send of control messages, and what becomes of the rest; decided before a body is parsed.

A flood is read no faster than each message of it costs: what is beyond the share is refused, and its tenant is told so
as often as it may ask; beyond that it is counted and logged alone, at a tenth of a millisecond each.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum, auto

from consumers.control.question import Question
from consumers.share import Share
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem

AT_ONCE_S = 5
"""Seconds of its share that a tenant may send at once: who cancels all of its requests is no flood."""


class Due(Enum):
    """What is done with a control message."""

    CARRIED_OUT = auto()
    REFUSED = auto()
    COUNTED = auto()
    """Refused as well, and nobody is told."""


class Allowance:
    """By tenant, in this process."""

    def __init__(
        self, *, per_tenant_s: float, speakers: Collection[str], question: Callable[[Message], Question | None]
    ) -> None:
        self._share = Share(per_s=per_tenant_s, at_once=AT_ONCE_S * per_tenant_s)
        self._told = Share(per_s=per_tenant_s, at_once=AT_ONCE_S * per_tenant_s)
        self._speakers = frozenset(speakers)
        self._question = question
        self.problem = RequestProblem(
            "too_many_control_messages",
            f"a tenant may send {per_tenant_s:g} control messages a second, and {AT_ONCE_S} times as many at "
            "once; this one was not carried out: send it again later",
        )

    def due(self, message: Message) -> Due:
        """Counts it."""
        whose = self._whose(message)
        if self._share.take(whose):
            return Due.CARRIED_OUT
        return Due.REFUSED if self._told.take(whose) else Due.COUNTED

    def _whose(self, message: Message) -> str:
        """The tenant that it speaks for. Only who may speak for others can mean another than itself: of nobody else's
        the body is read."""
        user = message.user_id or ""
        if user in self._speakers:
            with suppress(RequestProblem):
                question = self._question(message)
                return question.identity.tenant if question is not None else user
        return user
