"""A page in a browser follows a request by EventSource, and misses nothing while its gateway is restarted."""

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from service.simulated.options import SimulatedOptions
from tests.support.chromium import PROGRAM, Page, opened
from tests.support.http_calls import call, submit
from tests.support.processes import Running, environment, lanekeeper
from tests.support.serving import serving
from tests.support.waiting import STARTED_S, until

PAGE = Path(__file__).parents[1] / "support" / "following.html"
LONG = f"[[latency: 15s]] {'a word ' * 30}"
PIECES = SimulatedOptions(stream_deltas=60)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed (Debian: apt install chromium)"
    ),
]


async def address_of(gateway: Running) -> str:
    return str((await gateway.tells("gateway.ready", within_s=STARTED_S))["url"])


async def holds(page: Page, expression: str) -> None:
    """Wait until this JavaScript is true on the page."""
    await until(lambda: page.value(expression), within_s=STARTED_S)


async def see_that_nothing_is_missing(page: Page) -> None:
    found: list[dict[str, Any]] = await page.value("found")
    assert [each["number"] for each in found] == list(range(1, len(found) + 1))
    assert [each["kind"] for each in found[:2]] == ["queued", "started"]
    assert {each["kind"] for each in found[2:-1]} == {"event"}
    assert found[-1]["kind"] == "completed"
    text = "".join(each["data"]["delta"].get("text", "") for each in found if "delta" in each["data"])
    assert text == found[-1]["data"]["result"]["content"][0]["text"]


async def test_an_event_source_goes_on_after_an_orderly_restart_of_its_gateway(vhost, tmp_path: Path) -> None:
    """The gateway that stops waits for another call, and answers meanwhile."""
    async with serving(vhost.amqp_url, simulated=PIECES) as worker:
        environ = environment(vhost.amqp_url, vhost.management_url, LANEKEEPER_GRACE_S="120")
        async with lanekeeper("gateway", "--port", "0", environ=environ, folder=tmp_path) as first:
            url = await address_of(first)
            async with opened(f"{url}/page", PAGE.read_text(), folder=tmp_path) as page:
                slow = {"prompt": "[[latency: 250s]] other"}
                other = asyncio.create_task(call("POST", f"{url}/v1/messages", slow, x_lane_name="batch"))
                await worker.api.until(lambda: worker.api.running == 1)
                submitted = await submit(url, LONG, stream=True)
                await page.value(f"followByEvents({json.dumps(submitted['events_url'])})")
                await holds(page, "found.length > 5")
                first.send(signal.SIGTERM)
                await holds(page, "followed.opened > 1 || followed.source.readyState === EventSource.CLOSED")
                assert not first.has_ended
                other.cancel()
                assert await first.ended() == 0
                assert not await page.value("hasEnded()")
                port = url.rpartition(":")[2]
                async with lanekeeper("gateway", "--port", port, environ=environ, folder=tmp_path) as second:
                    assert await address_of(second) == url
                    await holds(page, "hasEnded()")
                    await see_that_nothing_is_missing(page)
                    await holds(page, "followed.source.readyState === EventSource.CLOSED")  # it asks no more
        assert len(worker.calls("a word")) == 1
