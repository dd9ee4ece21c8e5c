"""Defines places in the processing of a request at which the worker can kill itself at random. Fault tests use them to
check that no request is lost.

A place is active only if a setting gives it a probability. The names of the places, in the order in which a request
reaches them: before_claim, after_claim, after_call, after_keep, after_store, after_publish, after_confirm, after_ack
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
"""How many seconds after `Failpoints.reach_soon` the process dies: by then a publish is usually written to the socket,
but not confirmed yet."""


class Failpoints:
    """For tests: kills the process with a certain probability when a request reaches a named place. `chances`: the
    probability (0 to 1) for each place, by its name."""

    def __init__(self, chances: Mapping[str, float] | None = None) -> None:
        self._chances = dict(chances or {})

    def reach(self, name: str) -> None:
        """Kill the process, with the probability of the place `name`, without any clean-up, as SIGKILL does."""
        if self._chances and random.random() < self._chances.get(name, 0):
            os._exit(EXIT_CODE)

    def reach_soon(self, name: str) -> None:
        """Kill the process, with the probability of the place `name`, `SOON_S` from now, when the publish that the
        caller begins next has been written to the socket."""
        if self._chances and random.random() < self._chances.get(name, 0):
            asyncio.get_running_loop().call_later(SOON_S, os._exit, EXIT_CODE)
