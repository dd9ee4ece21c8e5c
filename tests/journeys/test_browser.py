"""Pages in a browser: one that follows requests by EventSource and by WebSocket, and misses nothing while its gateway
is restarted; and the programs in docs/clients.md."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.browser import Page, opened
from tests.support.gate import call, gate, submit
from tests.support.processes import Running, environment, lanekeeper
from tests.support.serving import HeldProvider, serving
from tests.support.sources import ROOT
from tests.support.waiting import STARTED_S, until

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[1] / "support" / "following.html"
PROMPT = "a word " * 25
LANE = {"x-lane-name": "batch"}
"""Its deadline and its time between two events are longer than a gateway takes to start on a busy machine."""
BOTH = ("byEvents", "bySocket")


class Story:
    """A page that follows one request by each way, and its gateway on one port."""

    def __init__(self, vhost: Any, provider: HeldProvider, folder: Path) -> None:
        self._provider = provider
        self._folder = folder
        self._environ = environment(vhost, LANEKEEPER_GRACE_S="120")
        self._port = "0"
        self.page: Page
        self.url = ""

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[Running]:
        async with lanekeeper("gateway", "--port", self._port, environ=self._environ, folder=self._folder) as gateway:
            self.url = str((await gateway.tells("gateway.ready", within_s=STARTED_S))["url"])
            self._port = self.url.rpartition(":")[2]
            yield gateway

    async def follows_two(self) -> None:
        """Until the page has the first part of both."""
        submitted = await submit(self.url, PROMPT, stream=True, **LANE)
        message = {"role": "user", "content": PROMPT}
        body = {"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": [message], "stream": True}
        await self.page.value(f"followByEvents({json.dumps(submitted['events_url'])})")
        await self.page.value(f"followBySocket('from-a-page', {json.dumps({'body': body, 'headers': LANE})})")
        for way in BOTH:
            await self.holds(f"{way}.found.length > 5")

    async def goes_on_with_another_gateway(self) -> None:
        """The middle comes while no gateway runs, and the end when both are followed again."""
        before = [await self.page.value(f"{way}.last") for way in BOTH]
        self._provider.go_on()
        async with self.gateway():
            for way, last in zip(BOTH, before, strict=True):
                await self.holds(f"{way}.last > {last}")
            self._provider.go_on()
            for way in BOTH:
                await self.holds(f"{way}.hasEnded")
                await self.see_that_nothing_is_missing(way)
            await self.holds("byEvents.source.readyState === EventSource.CLOSED")  # it asks no more

    async def holds(self, expression: str) -> None:
        """Wait until this JavaScript is true on the page."""
        await until(lambda: self.page.value(expression), within_s=STARTED_S)

    async def see_that_nothing_is_missing(self, way: str) -> None:
        assert await self.page.value(f"{way}.problems") == []
        found: list[dict[str, Any]] = await self.page.value(f"{way}.found")
        assert [each["number"] for each in found] == list(range(1, len(found) + 1))
        assert [each["kind"] for each in found[:2]] == ["queued", "started"]
        assert {each["kind"] for each in found[2:-1]} == {"event"}
        assert found[-1]["kind"] == "completed"
        text = "".join(each["data"]["delta"].get("text", "") for each in found if "delta" in each["data"])
        assert text == found[-1]["data"]["result"]["content"][0]["text"] == f"echo: {PROMPT}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stops", "is killed"])
async def test_a_page_misses_nothing_when_its_gateway_ends_and_another_starts(
    vhost: Vhost, tmp_path: Path, number: signal.Signals
) -> None:
    """A gateway that stops waits for another call, and answers meanwhile."""
    async with HeldProvider(parts=3) as provider, serving(vhost, base_url=provider.base_url):
        story = Story(vhost, provider, tmp_path)
        async with story.gateway() as first, opened(f"{story.url}/page", PAGE.read_text(), folder=tmp_path) as page:
            story.page = page
            body = {"prompt": "x", "stream": True}
            other = asyncio.create_task(call("POST", f"{story.url}/v1/messages", body, **LANE))
            await until(lambda: provider.calls == 1)
            await story.follows_two()
            first.send(number)
            if number == signal.SIGTERM:
                await story.holds("byEvents.opened > 1 || byEvents.source.readyState === EventSource.CLOSED")
                await story.holds("bySocket.lost > 1")  # the call for another WebSocket was refused
                assert not first.has_ended
                other.cancel()
            else:
                for way in BOTH:
                    await story.holds(f"{way}.lost > 0")
            assert await first.ended() == (0 if number == signal.SIGTERM else -number)
            await asyncio.wait([other])
            await story.goes_on_with_another_gateway()
        assert provider.calls == 3


PROGRAMS = re.findall(r"```typescript\n(.*?)```", (ROOT / "docs/clients.md").read_text(), re.DOTALL)
CONSOLE = "<!doctype html><script>const told = []; console.log = (...said) => told.push(JSON.stringify(said));</script>"


@pytest.mark.parametrize("program", PROGRAMS, ids=["EventSource", "WebSocket"])
async def test_an_example_prints_the_answer(vhost: Vhost, tmp_path: Path, program: str) -> None:
    async with serving(vhost) as worker, gate(worker) as url, opened(f"{url}/page", CONSOLE, folder=tmp_path) as page:
        await page.value(f"(async () => {{ {program} }})(), 0")
        await until(
            lambda: page.value("told.some((said) => said.includes('echo: Tell me a story.'))"), within_s=STARTED_S
        )
        assert len(worker.calls("Tell me a story.")) == 1
