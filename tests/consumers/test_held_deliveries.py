"""No delivery is held longer than the broker's consumer timeout. Otherwise the broker would deliver its request again,
without end."""

import asyncio
from typing import Any

from consumers import claiming
from consumers.state.base import StoreUnavailable
from tests.support.jobs import NOW_MS, Bench, read
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import virtually


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
        "claim": 60,
        "find": 20,
        "reserve": 20,
        "defer": 20,
    }
