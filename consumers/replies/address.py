"""Decides where replies may go, by the address and the user that the broker has checked. Pure.

A worker may write to every queue, so a `reply_to` could make it write where its requester may not (threat T1).

open    the default: names that nobody can choose (`amq.gen-…`, direct reply-to), `lane.reply.…`, and any queue outside
        `lane.` and `amq.`. A publisher who knows the name of another's queue can send answers there
bound   direct reply-to, and `lane.reply.<user_id>` and `lane.reply.<user_id>.…` of the user that published; of any
        other queue the owner is unknown
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem

LONGEST = 255
_BROKER_NAMED = re.compile(r"amq\.gen-[A-Za-z0-9_-]{22}")
"""A queue that the broker named: clients cannot create one (docs/facts.md, section 6)."""
_DIRECT = re.compile(r"amq\.rabbitmq\.reply-to\.[A-Za-z0-9._+/=-]{1,200}")
_USER = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""User names as `topology export` allows them. With dots, one user's name could be the beginning of another's queue."""
_SHOWN = 100


def is_direct(address: str) -> bool:
    """Whether an address has the form of a direct reply-to address."""
    return _DIRECT.fullmatch(address) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRule:
    """`allow`: only addresses of these patterns. `bound`: only queues of the user who published."""

    names: Names
    allow: Sequence[re.Pattern[str]] | None = None
    bound: bool = False

    def allows(self, address: str, *, user: str | None) -> bool:
        """Whether a reply may go there; `user`: who published, as the broker has checked."""
        if len(address) > LONGEST:
            return False
        may = self._is_bound(address, user) if self.bound else self._is_open(address)
        return may and (self.allow is None or any(pattern.fullmatch(address) for pattern in self.allow))

    def allows_control(self, address: str, *, user: str | None) -> bool:
        """Whether the answer to a control message may go there: never to a queue whose name a client can choose."""
        if len(address) > LONGEST:
            return False
        return self._is_bound(address, user) or (not self.bound and _BROKER_NAMED.fullmatch(address) is not None)

    def refusal(self, address: str, *, user: str | None) -> RequestProblem:
        """The problem of an address that is not allowed."""
        reply = self.names.reply_prefix
        if not self.bound:
            may = f"a queue that the broker named, direct reply-to, {reply}…, or a queue of the application's own"
        elif user is None:
            may = f"direct reply-to, or with the property user_id, which the broker checks, {reply}<user_id>"
        elif _USER.fullmatch(user):
            may = f"direct reply-to, {reply}{user}, or {reply}{user}.…"
        else:
            may = "direct reply-to"
        return RequestProblem("forbidden_reply_to", f"reply_to {address[:_SHOWN]!r}: allowed are {may}")

    def _is_open(self, address: str) -> bool:
        namespace = self.names.namespace
        if address == namespace or (
            address.startswith(f"{namespace}.") and not address.startswith(self.names.reply_prefix)
        ):
            return False
        return not address.startswith("amq.") or bool(_BROKER_NAMED.fullmatch(address) or is_direct(address))

    def _is_bound(self, address: str, user: str | None) -> bool:
        if is_direct(address):
            return True
        own = f"{self.names.reply_prefix}{user}"
        return user is not None and _USER.fullmatch(user) is not None and f"{address}.".startswith(f"{own}.")
