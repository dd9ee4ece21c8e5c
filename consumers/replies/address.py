"""Decides whether a reply may be sent to the address in a request's `reply_to`. Does no I/O.

A worker may publish to every queue. So without this rule a requester could name, in `reply_to`, a queue to which the
requester itself may not publish, and the worker would publish there (threat T1 in docs/security.md). The rule has two
modes:

open    The default. Allowed are addresses that the broker has named (queues `amq.gen-…`, direct reply-to), queues
        `lane.reply.…`, and any queue whose name begins neither with `lane.` nor with `amq.`. A requester who knows the
        name of another client's queue can make a worker send replies there.
bound   Allowed are direct reply-to, and the queues `lane.reply.<user_id>` and `lane.reply.<user_id>.…` of the
        request's user. Other queues are not allowed, because it is unknown to which user they belong.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem

LONGEST = 255
"""The maximum length, in characters, of a reply address."""
_BROKER_NAMED = re.compile(r"amq\.gen-[A-Za-z0-9_-]{22}")
"""The pattern of the names that the broker itself gives to queues. Clients cannot create a queue with such a name
(docs/facts.md, section 6)."""
_DIRECT = re.compile(r"amq\.rabbitmq\.reply-to\.[A-Za-z0-9._+/=-]{1,200}")
_USER = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The pattern of the user names that `topology export` allows. Dots are excluded, because otherwise the queue
`lane.reply.a.b` could belong to the user `a` or to the user `a.b`."""
_SHOWN = 100
"""An error's text quotes at most this many characters of a forbidden reply address."""


def is_direct(address: str) -> bool:
    """Whether a reply address has the form of a direct reply-to address (`amq.rabbitmq.reply-to.…`)."""
    return _DIRECT.fullmatch(address) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRule:
    """The rule that says to which addresses replies may be sent, with its settings. `bound`: whether the rule's mode is
    `bound`; otherwise the mode is `open`. `allow`: patterns, one of which an address must match, in addition to what
    the mode demands; None: there is no such condition."""

    names: Names
    allow: Sequence[re.Pattern[str]] | None = None
    bound: bool = False

    def allows(self, address: str, *, user: str | None) -> bool:
        """Whether a reply may be sent to an address. `user`: the `user_id` of the request, which the broker has
        checked; None if the request has no `user_id`."""
        if len(address) > LONGEST:
            return False
        may = self._is_bound(address, user) if self.bound else self._is_open(address)
        return may and (self.allow is None or any(pattern.fullmatch(address) for pattern in self.allow))

    def allows_control(self, address: str, *, user: str | None) -> bool:
        """Whether the answer to a control message (cancel, result) may be sent to an address. Allowed are direct
        reply-to, the user's own reply queues (`lane.reply.<user_id>`) and, in mode `open`, queues that the broker has
        named. `user`: the `user_id` of the control message."""
        if len(address) > LONGEST:
            return False
        return self._is_bound(address, user) or (not self.bound and _BROKER_NAMED.fullmatch(address) is not None)

    def refusal(self, address: str, *, user: str | None) -> RequestProblem:
        """The error for a reply address that is not allowed. Its text says which addresses are allowed."""
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
