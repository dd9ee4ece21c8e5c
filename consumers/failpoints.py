"""Defines places in the processing of a request at which the worker can kill itself at random. Fault tests use them to
check that no request is lost.

A place is active only if a setting gives it a probability. A request reaches the places in this order: before_claim,
after_claim, after_call, after_keep, after_store, after_publish, after_confirm, after_ack
"""

import asyncio
import os
import random
from collections.abc import Mapping

NAMES = frozenset(
    {
        "before_claim",
        "after_claim",
        "after_call",
        "after_keep",
        "after_store",
        "after_publish",
        "after_confirm",
        "after_ack",
    }
)
EXIT_CODE = 86
SOON_S = 0.0005
"""How many seconds after a call of `Failpoints.reach_soon` the process dies. By then a publish that began right after
the call is usually written to the socket, but not confirmed yet."""


class Failpoints:
    """For tests: kills the process with a certain probability when a request reaches a named place. `chances`: the
    probability (0 to 1) for each place, by its name."""

    def __init__(self, chances: Mapping[str, float] | None = None) -> None:
        self._chances = dict(chances or {})

    def reach(self, name: str) -> None:
        """With the probability of the place `name`, kill the process now, without any clean-up, as SIGKILL does."""
        if self._chances and random.random() < self._chances.get(name, 0):
            os._exit(EXIT_CODE)

    def reach_soon(self, name: str) -> None:
        """With the probability of the place `name`, kill the process `SOON_S` from now: by then the publish that the
        caller begins next is usually written to the socket."""
        if self._chances and random.random() < self._chances.get(name, 0):
            asyncio.get_running_loop().call_later(SOON_S, os._exit, EXIT_CODE)
