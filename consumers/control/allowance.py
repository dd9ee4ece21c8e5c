"""Limits how many control messages (to cancel a request or fetch a result) a tenant may send. Messages over the limit
are refused.

The control messages of all tenants are in one queue, where they wait behind those of a tenant that sends too many, so
refusing a message must be cheap. The answers with which messages are refused have a limit of the same size; above it, a
message is only counted and logged, which takes a tenth of a millisecond. The decision does not need the message's body,
unless the user of the message is one of `speakers`, the users that may act for other tenants, because they name the
tenant in the body."""

from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum, auto

from consumers.control.command import Command
from consumers.rate_limit import RateLimit
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem

AT_ONCE_S = 5
"""A tenant may send at once as many control messages as its limit allows in this many seconds, so that it can cancel
many requests at once."""


class Verdict(Enum):
    """Says what happens to a control message: it is carried out, refused with an answer, or refused without one."""

    CARRIED_OUT = auto()
    REFUSED = auto()
    """The control message is refused, and its sender gets an answer that says so."""
    COUNTED = auto()
    """The control message is refused without an answer, and only counted and logged."""


class Allowance:
    """Limits how many control messages a tenant may send. Each process counts only the messages that it receives
    itself. `per_tenant_s`: how many messages a tenant may send a second. `speakers`: the users that may act for other
    tenants."""

    def __init__(
        self, *, per_tenant_s: float, speakers: Collection[str], read_command: Callable[[Message], Command | None]
    ) -> None:
        self._limit = RateLimit(per_s=per_tenant_s, at_once=AT_ONCE_S * per_tenant_s)
        self._answered = RateLimit(per_s=per_tenant_s, at_once=AT_ONCE_S * per_tenant_s)
        self._speakers = frozenset(speakers)
        self._read_command = read_command
        self.problem = RequestProblem(
            "too_many_control_messages",
            f"a tenant may send {per_tenant_s:g} control messages a second, and {AT_ONCE_S} times as many at "
            "once; this one was not carried out: send it again later",
        )

    def decide(self, message: Message) -> Verdict:
        """Count a control message against its tenant's limit, and decide what happens to it."""
        tenant = self._tenant(message)
        if self._limit.take(tenant):
            return Verdict.CARRIED_OUT
        return Verdict.REFUSED if self._answered.take(tenant) else Verdict.COUNTED

    def _tenant(self, message: Message) -> str:
        """The tenant against whose limit a control message counts."""
        user = message.user_id or ""
        if user in self._speakers:
            with suppress(RequestProblem):
                command = self._read_command(message)
                return command.identity.tenant if command is not None else user
        return user
