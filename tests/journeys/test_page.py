"""The live page in a browser, by keyboard alone: a flood is watched, a lane braked and let go, a dead letter found,
mended and replayed. What a requester wrote never becomes part of the page."""

import json
from pathlib import Path

import aiohttp
import pytest

from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.chromium import Page, opened
from tests.support.http_calls import call
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.waiting import STARTED_S, until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("chromium")]

HOSTILE = "<img src=x onerror=\"document.title='taken'\"> [[fault: invalid]]"


class Seen:
    """What somebody sees on the page, and the keys that they press."""

    def __init__(self, page: Page) -> None:
        self.page = page

    async def shows(self, selector: str, words: str) -> None:
        has = f"e => e.textContent.includes({json.dumps(words)})"
        found = f"[...document.querySelectorAll({json.dumps(selector)})].some({has})"
        await until(lambda: self.page.value(found), within_s=STARTED_S)

    async def tab_to(self, words: str) -> None:
        """Press Tab until the element in focus has these words as its name."""
        name = "(e => e.matches('button') && (e.ariaLabel ?? e.textContent))(document.activeElement)"
        for _ in range(60):
            if words in str(await self.page.value(name)):
                return
            await self.page.press("Tab")
        raise AssertionError(f"no element named {words!r} can be reached by Tab")

    async def choose(self, words: str) -> None:
        await self.tab_to(words)
        await self.page.press("Enter")


async def test_an_operator_watches_brakes_and_mends_by_keyboard(vhost: Vhost, tmp_path: Path) -> None:
    environ = environment(vhost.amqp_url, vhost.management_url, LANEKEEPER_LANES__BATCH__SLOTS="2")
    async with (
        lanekeeper("serve", "--simulate", "--port", "0", environ=environ, folder=tmp_path) as served,
        requester(vhost.amqp_url) as app,
    ):
        url = await served.ready()
        asked = await app.publish({"prompt": HOSTILE}, key="batch.nightly.x", message_id="broken")
        assert (await app.final(asked)).code == "provider_rejected"
        flood = [await app.publish({"prompt": f"job {n} [[latency: 1s]]"}, key="batch.nightly.x") for n in range(40)]
        async with opened(f"{url}/", folder=tmp_path) as page:
            seen = Seen(page)
            await seen.shows("#link", "live, 1 worker")
            await until(lambda: page.value("+document.querySelectorAll('.depth, .big')[6].firstChild.data > 10"))
            await seen.shows("#failures", "provider_rejected")

            await page.press("b")
            await page.press("Tab", "night")  # from the name, which is in focus, to the time, and further
            await page.press("Escape")
            await seen.choose("Brake lane batch")
            await page.press("for the night")
            await page.press("Enter")
            await seen.shows(".lane .tag", "braked")
            await seen.shows("#pauses", "for the night")
            await until(lambda: page.value("document.querySelector('[aria-label=\"lane batch\"] .slots .on') === null"))

            await page.press("d")
            await page.press("Enter")
            await seen.shows("#dialog-title", "1 dead letters")
            await seen.shows("#dialog", "broken")
            await seen.choose("broken")
            await seen.shows("#dialog-title", "broken")
            body = "document.querySelector('#dialog textarea')"
            await seen.shows("#dialog label", "body")
            assert HOSTILE in json.loads(await page.value(f"{body}.value"))["prompt"]
            await until(lambda: page.value(f"document.activeElement === {body}"))
            await page.value(f"{body}.select()")
            await page.press('{"prompt": "mended"}')
            await seen.choose("Dry run")
            await seen.shows("#dialog", "1 would be replayed")
            await seen.choose("Replay")
            await seen.shows("#dialog", "1 replayed")
            await page.press("Escape")
            await seen.shows("#dead", "None.")

            await seen.choose("Let go lane batch")
            for each in flood:
                assert (await app.final(each)).status == "ok"
            found = await until(lambda: _result(url, "broken"), within_s=STARTED_S)
            assert found["content"][0]["text"] == "echo: mended"
            assert await page.value("document.title") == "Lanekeeper", "what a requester wrote was not run"


async def test_a_key_may_look_and_not_touch_and_another_key_sees_nothing(vhost: Vhost, tmp_path: Path) -> None:
    keys = {
        "look": {"tenant": "ops", "lanes": ["normal"], "operator": "look"},
        "none": {"tenant": "crm", "lanes": ["normal"]},
    }
    environ = environment(
        vhost.amqp_url,
        vhost.management_url,
        LANEKEEPER_GATEWAY__KEYS=json.dumps({hash_of(key): allowed for key, allowed in keys.items()}),
        LANEKEEPER_SPEAKERS=vhost.user,
    )
    async with lanekeeper("serve", "--simulate", "--port", "0", environ=environ, folder=tmp_path) as served:
        url = await served.ready()
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{url}/") as page:
                assert page.status == 200
                assert "default-src 'none'" in page.headers["content-security-policy"]
            for key, status in (("look", 200), ("none", 403), ("unknown", 401)):
                async with http.get(f"{url}/v1/live", headers={"x-api-key": key}) as live:
                    assert live.status == status
        pause = {"kind": "lane", "name": "batch"}
        for method, path, body in (
            ("POST", "/v1/pauses", pause),
            ("POST", "/v1/dead/replay", {"code": "poison"}),
            ("DELETE", "/v1/dead/x", None),
        ):
            assert (await call(method, f"{url}{path}", body, x_api_key="look")).status == 403
        for path in ("/v1/pauses", "/v1/dead"):
            assert (await call("GET", f"{url}{path}", x_api_key="look")).status == 200
            assert (await call("GET", f"{url}{path}", x_api_key="none")).status == 403


async def _result(url: str, id: str) -> dict[str, object] | None:
    found = await call("GET", f"{url}/v1/requests/{id}")
    return found.body.get("result") if found.status == 200 else None
