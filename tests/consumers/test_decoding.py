"""Large bodies are parsed one at a time with pauses, so that other tasks get the event loop."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from consumers.decoding import AT_ONCE_S, Decoding, Parsing
from consumers.job import Chain
from consumers.providers.routes import ProviderModels, Routes, RoutesSpec
from lanekeeper.contract import names as n
from tests.support.jobs import Bench
from tests.support.virtual_time import in_virtual_time
from topology import lanes

CRITICAL, BATCH = 0, 2
LONG_S = 0.05
LARGE = 100_000


class Ground:
    """Reading takes time, during which nothing else runs."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worked_s = 0.0
        self.parsing = Parsing(clock=lambda: self._loop.time() + self._worked_s)
        self.began: list[tuple[str, float]] = []

    def taking(self, name: str, s: float) -> Callable[[], str]:
        def work() -> str:
            self.began.append((name, self._loop.time()))
            self._worked_s += s
            return name

        return work

    def read(self, name: str, *, lane: int = BATCH, size: int = LARGE, s: float = LONG_S) -> "asyncio.Task[str]":
        return asyncio.ensure_future(self.parsing.run(self.taking(name, s), rank=(lane, size)))

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.began]


@in_virtual_time
async def test_the_most_urgent_lane_is_read_first_then_the_shortest_body() -> None:
    ground = Ground()
    await asyncio.gather(
        ground.read("first"),
        ground.read("long", size=LARGE * 2),
        ground.read("short", size=LARGE // 2),
        ground.read("critical", lane=CRITICAL, size=LARGE * 3),
        ground.read("short too", size=LARGE // 2),
    )

    assert ground.order == ["first", "critical", "short", "short too", "long"]


@in_virtual_time
async def test_a_body_whose_reading_fails_or_is_cancelled_does_not_block_others() -> None:
    ground = Ground()

    def broken() -> None:
        raise ValueError("broken")

    first, waiting, last = ground.read("first"), ground.read("waiting"), ground.read("last")
    await first
    waiting.cancel()
    with pytest.raises(ValueError, match="broken"):
        await ground.parsing.run(broken, rank=(CRITICAL, LARGE))
    assert await last == "last"
    assert ground.order == ["first", "last"]


@in_virtual_time
async def test_a_body_that_is_cancelled_in_its_turn_passes_the_turn_on() -> None:
    ground = Ground()
    first, second, last = ground.read("first"), ground.read("second"), ground.read("last")
    await first
    asyncio.get_running_loop().call_later(LONG_S - AT_ONCE_S, second.cancel)  # its turn comes at the same moment
    assert await last == "last"
    assert ground.order in (["first", "last"], ["first", "second", "last"])


@pytest.mark.parametrize("given", [{"type": "echo"}, {"headers": {n.PIPELINE: "two-steps"}}])
async def test_a_handler_or_a_pipeline_needs_no_provider(given: dict[str, Any]) -> None:
    def none_is_asked_for(*_: str) -> Chain:
        raise AssertionError

    decoding = Decoding(Parsing(), none_is_asked_for, handlers=("echo",), pipelines=("two-steps",))
    assert (await decoding.decode(Bench().job(**given), lanes.CRITICAL)).chain == Chain()


async def test_a_tenants_models_are_also_those_that_the_provider_may_ask() -> None:
    spec = RoutesSpec(providers=(ProviderModels(name="one"),), tenants={"shop": ("cheap",)})
    decoding = Decoding(Parsing(), Routes(spec).of, forbidden_to=Routes(spec).forbidden_to)
    asked = {"model": "cheap", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    for user, fallbacks, forbidden in (
        ("shop", [{"model": "dear"}], "model 'dear' is not for tenant 'shop'; allowed: cheap"),
        ("shop", [{"model": "cheap"}], ""),
        ("other", [{"model": "dear"}], ""),
    ):
        body = json.dumps({**asked, "fallbacks": fallbacks}).encode()
        decoded = await decoding.decode(Bench().job(body=body, user_id=user), lanes.CRITICAL)
        assert (decoded.chain.forbidden, bool(decoded.chain.routes)) == (forbidden, not forbidden)
