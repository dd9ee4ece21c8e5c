"""The live page in a browser, by keyboard alone. What a requester wrote never becomes part of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aio_pika
import aio_pika.abc
import aiohttp
import pytest
from aiohttp import web

from lanekeeper import Client
from service.config.flows import PipelineSettings
from service.gateway.access import hash_of
from service.simulated.app import SimulatedAPI, SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.browser import Seen, opened
from tests.support.endpoint import endpoint
from tests.support.gate import call
from tests.support.processes import environment, lanekeeper
from tests.support.requester import Requester, requester
from tests.support.serving import serving
from tests.support.waiting import STARTED_S, until

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=\"document.title='taken'\"> [[fault: invalid]]"


async def test_an_operator_watches_brakes_and_mends_by_keyboard(vhost: Vhost, tmp_path: Path) -> None:
    environ = environment(vhost, LANEKEEPER_LANES__BATCH__SLOTS="2")
    async with lanekeeper("serve", "--simulate", environ=environ, folder=tmp_path) as served, requester(vhost) as app:
        url = await served.ready()
        asked = await app.publish({"prompt": HOSTILE}, key="batch.nightly.x", message_id="broken")
        assert (await app.final(asked)).code == "provider_rejected"
        async with opened(f"{url}/", folder=tmp_path) as page:
            seen = Seen(page)
            await seen.shows("#link", "live, 1 worker")
            flood = [
                await app.publish({"prompt": f"job {n} [[latency: 1s]]"}, key="batch.nightly.x") for n in range(40)
            ]
            waiting = "document.querySelector('[aria-label=\"lane batch\"] .waiting .big').firstChild.data"
            await until(lambda: page.value(f"+{waiting} > 10"))
            await seen.shows("#failures", "provider_rejected")

            await page.press("b")
            await page.press("Tab", "night")  # from the name, which is in focus, to the time, and further
            await page.press("Escape")
            await seen.choose("Brake lane batch")
            await page.press("for the night")
            await page.press("Enter")
            await seen.shows(".lane .tag", "paused until")
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
            await seen.shows("#dialog button:disabled", "Replayed")
            await seen.shows("#dialog td", "waits to run again")
            await page.press("Escape")
            await seen.shows("#dead", "None.")

            await seen.choose("Release lane batch")
            for each in flood:
                assert (await app.final(each)).status == "ok"
            found = await until(lambda: _result(url, "broken"), within_s=STARTED_S)
            assert found["content"][0]["text"] == "echo: mended"
            assert await page.value("document.title") == "Lanekeeper", "what a requester wrote was not run"


async def test_a_request_found_by_its_id_shows_its_step_and_how_its_outcome_was_posted(
    vhost: Vhost, tmp_path: Path
) -> None:
    steps = [
        {"name": "parts", "each": "input", "prompt": "about {{ item }}"},
        {"name": "whole", "prompt": "{{ parts|length }} parts"},
    ]
    pipelines = {"two": PipelineSettings.model_validate({"steps": steps})}
    async with endpoint() as hook, serving(vhost, webhooks=hook.settings(), pipelines=pipelines) as worker:
        hook.answer = lambda posted: web.Response(status=500 if len(hook.posts) == 1 else 200)
        command = lanekeeper("gateway", "--port", "0", environ=environment(vhost), folder=tmp_path)
        async with requester(vhost) as app, command as gateway:
            url = (await gateway.tells("gateway.ready", within_s=STARTED_S))["url"]
            headers = {"x-lane-pipeline": "two", "x-lane-webhook": hook.url("/secret")}
            await app.publish(["a", "b [[held]]", "c"], message_id="found", headers=headers)
            async with opened(f"{url}/", folder=tmp_path) as page:
                seen = Seen(page)
                await seen.shows("#link", "live, 1 worker")
                await page.press("/")
                await page.press("found", "Enter")
                await seen.shows("#dialog td", "parts, 2 of 3")
                worker.api.release()
                await seen.shows("#dialog td", "completed")
                await page.press("Escape")
                await seen.shows("#webhooks", "delivered")
                await page.press("Enter")  # the field is in focus again, and still has the id
                await seen.shows("#dialog td", f"{hook.url('')}: delivered at")
                await seen.shows("#dialog td", "after 2 attempts")
                await seen.shows("#dialog td", "answered 500")
                assert "/secret" not in str(await page.value("document.body.textContent"))


async def test_a_key_may_look_and_not_touch_and_another_key_sees_nothing(vhost: Vhost, tmp_path: Path) -> None:
    keys = {
        "look": {"tenant": "ops", "lanes": ["normal"], "operator": "look"},
        "none": {"tenant": "crm", "lanes": ["normal"]},
    }
    environ = environment(
        vhost,
        LANEKEEPER_GATEWAY__KEYS=json.dumps({hash_of(key): allowed for key, allowed in keys.items()}),
        LANEKEEPER_SPEAKERS=vhost.user,
    )
    async with lanekeeper("serve", "--simulate", environ=environ, folder=tmp_path) as served:
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


async def test_the_live_page_goes_on_after_a_status_answer_that_it_cannot_read(vhost: Vhost, tmp_path: Path) -> None:
    environ = environment(vhost, LANEKEEPER_SPEAKERS=vhost.user)
    async with (
        lanekeeper("serve", "--simulate", environ=environ, folder=tmp_path) as served,
        await aio_pika.connect(vhost.amqp_url) as connection,
        aiohttp.ClientSession() as http,
    ):
        url = await served.ready()
        channel = await connection.channel()
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(await channel.get_exchange("lane.control"), "status")
        is_odd, answered = True, 0

        async def answer(question: aio_pika.abc.AbstractIncomingMessage) -> None:
            nonlocal answered
            if is_odd and question.reply_to is not None:
                told = {"worker": "of-another-version", "tenants": {"normal": {"crm": {"running": 1}}}}
                headers = {"x-lane-control": "accepted"}
                message = aio_pika.Message(
                    json.dumps(told).encode(), correlation_id=question.correlation_id, headers=dict(headers)
                )
                await channel.default_exchange.publish(message, routing_key=question.reply_to)
                answered += 1

        await queue.consume(answer, no_ack=True)
        async with http.get(f"{url}/v1/live") as live:

            async def next_status() -> dict[str, Any]:
                async for line in live.content:
                    if line.startswith(b"data: {"):
                        found = dict(json.loads(line.removeprefix(b"data: ")))
                        if "troubles" in found:  # and not the hour's history
                            return found
                raise AssertionError("the live page has ended")

            async with asyncio.timeout(STARTED_S):
                while "of-another-version sends a status that cannot be read" not in (await next_status())["troubles"]:
                    pass
                assert (await call("GET", f"{url}/v1/lanes")).status == 200
                is_odd = False
                while (await next_status())["troubles"]:
                    pass
        assert answered


async def test_a_group_shows_how_far_it_is_and_is_cancelled_by_keyboard(vhost: Vhost, tmp_path: Path) -> None:
    async with lanekeeper("serve", "--simulate", environ=environment(vhost), folder=tmp_path) as served:
        url = await served.ready()
        async with Client(vhost.amqp_url) as client, opened(f"{url}/", folder=tmp_path) as page:
            seen = Seen(page)
            await seen.shows("#link", "live, 1 worker")
            assert await page.value("document.getElementById('groups-section').hidden")
            prompts = ["a", "b [[fault: invalid]]", HOSTILE]
            bodies = [{"prompt": prompt} for prompt in prompts]
            group = await client.publish_many(bodies, key="normal.docs.night", group="night-1")
            await seen.shows(".group", "3 of 3, ended")
            await seen.shows(".group", "2 failed")
            assert (await group.progress()).status == "ended"

            later = {"x-lane-group": "later", "x-lane-group-size": 2500}
            await client.publish({"prompt": "x"}, key="normal.docs.night", headers=later)
            await client.publish({"prompt": "y"}, key="normal.docs.night", headers=later, delay_s=600)
            await seen.shows(".group", "1 of 2,500, ends about")
            await seen.choose("Cancel group later")
            await seen.shows(".group", "2 of 2,500, being cancelled")
            await seen.shows(".group", "1 cancelled")
            assert page.confirmed == ["Cancel what has not begun of the group later?"]
            assert (await client.group("later").progress()).cancelled == 1
            await seen.shows(".group button:disabled", "Cancelled")


async def test_a_whole_cause_of_dead_letters_is_edited_and_another_one_dropped(vhost: Vhost, tmp_path: Path) -> None:
    environ = environment(vhost, LANEKEEPER_LANES__NORMAL__MAX_ATTEMPTS="1")
    async with lanekeeper("serve", "--simulate", environ=environ, folder=tmp_path) as served, requester(vhost) as app:
        url = await served.ready()
        for number in range(3):
            await app.ask(
                {"prompt": f"{number} [[fault: invalid]]"}, key="normal.shop.ask", message_id=f"edit-{number}"
            )
            await app.ask({"prompt": f"{number} [[fault: server_error]]"}, key="normal.crm.ask")
        async with opened(f"{url}/", folder=tmp_path) as page:
            seen = Seen(page)
            await seen.shows("#dead", "attempts_exhausted")
            await seen.choose("attempts_exhausted: ")
            await seen.shows("#dialog-title", "3 dead letters")
            await seen.choose("Drop all")
            await seen.shows("#dialog", "3 dropped")
            await seen.shows("#dialog button:disabled", "Dropped")
            assert page.confirmed == ["Drop 3 dead letters for good?"]
            await page.press("Escape")
            await until(lambda: app.holds(3, "lane.dead"))
            await until(
                lambda: page.value("!document.getElementById('dead').textContent.includes('attempts_exhausted')")
            )

            await seen.choose("provider_rejected: ")
            await page.value("document.querySelector('#dialog summary').focus()")
            await page.press("Enter")
            await page.value("document.querySelector('#dialog textarea').focus()")
            await page.press('{"prompt": "mended"}')
            await page.value("document.querySelector('#dialog select').value = 'critical'")
            await seen.choose("Dry run")
            await seen.shows("#dialog", "3 would be replayed")
            await seen.choose("Replay all")
            await seen.shows("#dialog", "3 replayed")
            await seen.shows("#dialog button:disabled", "Replayed")
            await seen.shows("#dialog td", "completed")
            await page.press("Escape")
            await seen.shows("#dead", "None.")
        for number in range(3):
            found = await until(partial(_result, url, f"edit-{number}"), within_s=STARTED_S)
            assert found["content"][0]["text"] == "echo: mended"
            status = (await call("GET", f"{url}/v1/requests/edit-{number}")).body
            assert status["lane"] == "critical"


async def _result(url: str, id: str) -> dict[str, object] | None:
    found = await call("GET", f"{url}/v1/requests/{id}")
    return found.body.get("result") if found.status == 200 else None


async def test_the_live_page_names_what_stops_work(vhost: Vhost, tmp_path: Path) -> None:
    environ = environment(vhost, LANEKEEPER_SPEAKERS=vhost.user)
    async with lanekeeper("topology", "apply", environ=environ, folder=tmp_path) as apply:
        assert await apply.ended() == 0
    async with lanekeeper("gateway", "--port", "0", environ=environ, folder=tmp_path) as gateway:
        url = str((await gateway.tells("gateway.ready", within_s=STARTED_S))["url"])
        async with opened(f"{url}/", folder=tmp_path) as page:
            seen = Seen(page)
            await seen.shows("#alarm li", "No worker answers: no request is worked on.")
            await seen.shows("#link", "1 problem, 0 workers")

            of_two_lanes = ("consume", "--lane", "critical", "--lane", "normal", "--simulate")
            async with lanekeeper(*of_two_lanes, environ=environ, folder=tmp_path) as worker:
                await worker.ready()
                await seen.shows("#link", "1 problem, 1 worker")
                await seen.shows("#alarm li", "No worker takes requests of the lane batch.")


LONG = "abcdefghij" * 12
"""Without a place at which a line may be broken."""
LANE = "lane-with-the-longest-of-allowed"
WINDOWS = ((390, 844), (768, 1024), (1280, 800))
TARGET_PX = 44
TOO_WIDE = """((width) => {
  const found = [...document.body.querySelectorAll('*')].filter((each) => {
    const {left, right, width: own} = each.getBoundingClientRect();
    if (!own || each.closest('.scrolls > *, #plot *')) return false;
    const room = each.parentElement.closest('section, dialog, .lane')?.getBoundingClientRect();
    const isFree = each.matches('.scrolls, #plot, .clamp, .cause, input, select, textarea');
    const isInline = getComputedStyle(each).display === 'inline';
    if (!isFree && !isInline && each.scrollWidth > each.clientWidth + 1) return true;
    return left < -1 || right > width + 1 || (room && (left < room.left - 1 || right > room.right + 1));
  });
  return found.map((each) => `${each.tagName} ${each.id} ${each.className}: ${each.textContent.slice(0, 60)}`);
})"""
TOO_SMALL = f"""[...document.querySelectorAll('button, input, select, summary, textarea, a')].filter((each) => {{
  const {{width, height}} = each.getBoundingClientRect();
  return width && (width < {TARGET_PX - 0.5} || height < {TARGET_PX - 0.5});
}}).map((each) => `${{each.tagName}} ${{each.id}}: ${{each.textContent}}`)"""


@dataclass
class Crowded:
    url: str
    app: Requester


@asynccontextmanager
async def crowded(vhost: Vhost, folder: Path, *, letters: int) -> AsyncIterator[Crowded]:
    """A system with the longest names, an outage, a lane without workers, a group and many dead letters."""
    own = f"LANEKEEPER_LANES__{LANE.upper().replace('-', '_')}"
    async with SimulatedAPI(SimulatedOptions(api_key="another")) as api:  # 401: the provider pauses
        environ = environment(
            vhost, api, LANEKEEPER_SPEAKERS=vhost.user, **{f"{own}__RANK": "25", f"{own}__BATCHES__ENABLED": "false"}
        )
        async with lanekeeper("topology", "apply", environ=environ, folder=folder) as apply:
            assert await apply.ended() == 0
        gateway = lanekeeper("gateway", "--port", "0", environ=environ, folder=folder)
        worker = lanekeeper("consume", "--lane", "critical", "--lane", LANE, environ=environ, folder=folder)
        async with gateway as served, worker as consumer, requester(vhost) as app:
            url = str((await served.tells("gateway.ready", within_s=STARTED_S))["url"])
            await consumer.ready()
            for number in range(letters):
                detail = f"{chr(97 + number % 26)}{chr(97 + number // 26 % 2)} {LONG}: the same again and again " * 3
                headers = {
                    "x-lane-dead-code": "provider_rejected", "x-lane-dead-detail": detail,
                    "x-lane-routing-key": f"{LANE}.{LONG[:100]}.x", "x-lane-tenant": LONG,
                    "x-lane-dead-at": "2026-11-29T06:00:00.000Z",
                }  # fmt: skip
                await app.publish(b"{}", exchange="", key="lane.dead", headers=headers, message_id=f"{number}-{LONG}")
            for number in range(30):
                grouped = {"x-lane-tenant": f"{number}{LONG}", "x-lane-group": LONG, "x-lane-group-size": 12_345}
                await app.publish({"prompt": "x"}, key=f"{LANE}.{LONG[:100]}.x", headers=grouped, user_id=vhost.user)
            pause = {"kind": "tenant", "name": LONG, "why": LONG + LONG[:80]}
            assert (await call("POST", f"{url}/v1/pauses", pause)).status == 200
            yield Crowded(url, app)


async def test_nothing_is_wider_than_the_window_and_what_is_touched_is_large_enough(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with crowded(vhost, tmp_path, letters=300) as system, opened(f"{system.url}/", folder=tmp_path) as page:
        seen = Seen(page)

        async def see(where: str) -> None:
            for width, height in WINDOWS:
                await page.resize(width=width, height=height)
                await until(lambda: page.value(f"matchMedia('(width: {width}px)').matches"))  # noqa: B023
                assert await page.value(f"{TOO_WIDE}({width})") == [], f"{where} at {width}"
                if width == WINDOWS[0][0]:
                    assert await page.value(TOO_SMALL) == [], where

        await seen.shows("#alarm li", "No worker takes requests of the lane batch.")
        await seen.shows("#alarm li", "Provider anthropic")
        await seen.shows("#dead", LONG)
        await seen.shows("#groups", LONG)
        await seen.shows("#pauses", LONG)
        await see("the page")
        await seen.choose("provider_rejected: ")
        await seen.shows("#dialog td", LONG)
        await see("a cause")
        await page.value("document.querySelector('#dialog summary').click()")
        await see("a cause that is edited")
        await page.value("document.querySelector('#dialog td button').click()")
        await seen.shows("#dialog label", "body")
        await see("a dead letter")
        await page.press("Escape", "r")
        await seen.shows("#dialog td", LANE)
        await see("the list of requests")
        await page.value("document.querySelector('#dialog td button').click()")
        await seen.shows("#dialog td", LANE)
        await see("a request")
        await page.press("Escape", "b")
        await see("the brake")
        await page.press("Escape")
