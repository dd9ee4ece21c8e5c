"""No delivery is held longer than the broker's consumer timeout. Otherwise the broker would deliver its request again,
without end."""

import asyncio
from typing import Any

from consumers import claiming, gates, replies, settle
from consumers.batches import groups
from consumers.flows.pipelines import FILL_IN_WITHIN_S, ROOM_WITHIN_S
from consumers.job import (
    ASK_WITHIN_S,
    ATTEMPT_WITHIN_S,
    CLAIM_WITHIN_S,
    CONSUMER_TIMEOUT_S,
    SETTLE_WITHIN_S,
    STORE_WITHIN_S,
)
from consumers.limits.base import BudgetSpec
from consumers.slots import admission
from consumers.state.base import StoreUnavailable
from tests.support.jobs import NOW_MS, Bench, read
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import virtually

WAITS_S = {
    "pool: a slot of the lane": admission.HELD_S,
    "handler: the stored outcome of a reply that is sent again": ASK_WITHIN_S,
    "schedule gate: counting a long wait": ASK_WITHIN_S,
    "schedule gate: noting it, or asking whether the request has ended": ASK_WITHIN_S,
    "pipeline's first gate: counting what waits, and asking whether the request has ended": 3 * ASK_WITHIN_S,
    "claim gate": CLAIM_WITHIN_S,
    "group gate": groups.HOLD_S + 2 * ASK_WITHIN_S,
    "files gate": ASK_WITHIN_S,
    "body gate, or room for the outcomes of a pipeline's items": max(gates.FETCH_WITHIN_S, ROOM_WITHIN_S),
    "pipeline gate: filling in a template": FILL_IN_WITHIN_S,
    "route gate": gates.HOLD_S + gates.STAGGER_S,
    "caps gate": gates.TAKE_WITHIN_S,
    "budget gate": BudgetSpec().hold_s,
    "attempt: the end of a pause, and one or two calls": ATTEMPT_WITHIN_S,
    "attempt: the confirms of its parts": replies.PART_TIMEOUT_S,
    "claim gate: releasing the claim": claiming.RELEASE_AWAITED_S,
    "settle: making the answer sendable, storing and publishing it": SETTLE_WITHIN_S,
    "settle: releasing the claim if that failed": claiming.RELEASE_AWAITED_S,
    "settle: the pause before the delivery is returned": settle.RETURN_AFTER_S,
}
"""Each wait that can happen between delivery and acknowledgement, in order."""


def test_all_waits_of_a_delivery_together_are_shorter_than_the_consumer_timeout() -> None:
    assert sum(WAITS_S.values()) < CONSUMER_TIMEOUT_S == 1800, "RabbitMQ's default"


def test_there_is_time_to_publish_a_reply_after_the_longest_wait_for_the_store() -> None:
    assert STORE_WITHIN_S < SETTLE_WITHIN_S


class Hangs(MemoryStore):
    """A store that does not answer, like a file on a disk that hangs."""

    async def _hang(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    claim = find = reserve = defer = _hang


def test_a_store_that_hangs_holds_a_delivery_no_longer_than_these_limits() -> None:
    async def story() -> dict[str, float]:
        job = read(Bench().job())
        on = claiming.Claiming(Hangs())
        loop, took_s = asyncio.get_running_loop(), {}
        for name, waiting in {
            "claim": on.claim(job),
            "find": on.find(job.identity),
            "reserve": on.reserve(job, weight=1, until_ms=NOW_MS),
            "defer": on.defer_for_long(job, due_ms=NOW_MS, deadline_ms=NOW_MS),
        }.items():
            began_s = loop.time()
            try:
                await waiting
            except StoreUnavailable:
                took_s[name] = round(loop.time() - began_s, 3)
        return took_s

    assert virtually(story()) == {
        "claim": 30,
        "find": 10,
        "reserve": 10,
        "defer": 10,
    }
