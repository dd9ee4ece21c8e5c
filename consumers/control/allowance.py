"""Limits how many control messages a tenant may send. It decides before a message's body is read, except for users in
`speakers`, who name a tenant in the body.

A flood is read only as fast as its messages are processed, so each must cost little. Messages beyond the share are
refused. As many refusals as the share allows are answered. Further ones are only counted and logged, at a tenth of a
millisecond each."""

from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum, auto

from consumers.control.question import Question
from consumers.share import Share
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem

AT_ONCE_S = 5
"""A tenant may send the share of this many seconds in a burst, because cancelling all of one's requests is no flood."""


class Due(Enum):
    """What is done with a control message."""

    CARRIED_OUT = auto()
    REFUSED = auto()
    COUNTED = auto()
    """The message is refused without an answer."""


class Allowance:
    """Each tenant's share of control messages, in this process."""

    def __init__(
        self, *, per_tenant_s: float, speakers: Collection[str], question: Callable[[Message], Question | None]
    ) -> None:
        self._share = Share(per_s=per_tenant_s, at_once=AT_ONCE_S * per_tenant_s)
        self._answered = Share(per_s=per_tenant_s, at_once=AT_ONCE_S * per_tenant_s)
        self._speakers = frozenset(speakers)
        self._question = question
        self.problem = RequestProblem(
            "too_many_control_messages",
            f"a tenant may send {per_tenant_s:g} control messages a second, and {AT_ONCE_S} times as many at "
            "once; this one was not carried out: send it again later",
        )

    def due(self, message: Message) -> Due:
        """Count a message, and return what is done with it."""
        whose = self._whose(message)
        if self._share.take(whose):
            return Due.CARRIED_OUT
        return Due.REFUSED if self._answered.take(whose) else Due.COUNTED

    def _whose(self, message: Message) -> str:
        """The tenant that the message is for. Only users that may act for other tenants can name one, so only their
        messages are read to find it."""
        user = message.user_id or ""
        if user in self._speakers:
            with suppress(RequestProblem):
                question = self._question(message)
                return question.identity.tenant if question is not None else user
        return user
