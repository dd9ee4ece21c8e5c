"""Pages in a browser: one that follows requests by EventSource and by WebSocket, and misses nothing while its gateway
is restarted; the programs in docs/clients.md; and the live page, by keyboard alone. What a requester wrote never
becomes part of a page."""

import asyncio
import base64
import json
import re
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import aio_pika.abc
import aiohttp
import pytest
from aiohttp import web

from service.config.flows import PipelineSettings
from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.endpoint import endpoint
from tests.support.engine import GUARD, see_that_it_is_installed
from tests.support.gate import call, gate, submit
from tests.support.processes import Running, environment, lanekeeper
from tests.support.requester import requester
from tests.support.serving import HeldProvider, serving
from tests.support.sources import ROOT
from tests.support.waiting import STARTED_S, until

pytestmark = pytest.mark.slow
PROGRAM = "chromium"
OPTIONS = (
    "--headless",
    "--no-sandbox",  # which root needs
    "--no-proxy-server",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--disable-breakpad",
    # The page came from no address, so that calls of this machine's WebSockets would need a user's permission.
    "--disable-features=LocalNetworkAccessChecks,LocalNetworkAccessChecksWebSockets",
    "--remote-debugging-port=0",
)
CODES = {"Tab": 9, "Enter": 13, "Escape": 27}
"""Keys without a character, with their codes."""
_LISTENS = re.compile(rb"DevTools listening on (ws://\S+)")


class Page:
    def __init__(self, ws: aiohttp.ClientWebSocketResponse, html: str | None) -> None:
        self._ws = ws
        self._html = None if html is None else base64.b64encode(html.encode()).decode()
        self._session: dict[str, str] = {}
        self._sent = 0

    async def value(self, expression: str) -> Any:
        """What JavaScript on the page gives for an expression, as JSON."""
        found = await self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def press(self, *keys: str) -> None:
        """Press and release keys, or type a longer text."""
        for key in keys:
            if len(key) > 1 and key not in CODES:
                await self._ask("Input.insertText", text=key)
                continue
            given = {"key": key, "windowsVirtualKeyCode": CODES.get(key, ord(key[0].upper()))}
            typed = {"text": "\r" if key == "Enter" else key} if key in ("Enter", " ") or len(key) == 1 else {}
            await self._ask("Input.dispatchKeyEvent", type="keyDown", **given, **typed)
            await self._ask("Input.dispatchKeyEvent", type="keyUp", **given)

    async def picture(self, *, width: int, height: int, dark: bool) -> bytes:
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        await self._ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._ask("Emulation.setEmulatedMedia", features=[scheme])
        await asyncio.sleep(1.5)  # the chart is drawn again with the next snapshot
        return base64.b64decode((await self._ask("Page.captureScreenshot", format="png"))["data"])

    async def open(self, address: str) -> None:
        """Open `address`. If there is an HTML text, the browser answers with it, so that the page has the origin of the
        server there, as behind a proxy that serves both."""
        target = (await self._ask("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        if self._html is not None:
            await self._ask("Fetch.enable", patterns=[{"urlPattern": address}])
        found = await self._ask("Page.navigate", url=address)
        assert "errorText" not in found, found
        shown = f"location.href === '{address}' && document.readyState === 'complete'"
        await until(lambda: self.value(shown), within_s=STARTED_S)

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = await self._send(method, **params)
        async with asyncio.timeout(STARTED_S):
            while True:
                found: dict[str, Any] = await self._ws.receive_json()
                if found.get("id") == number:
                    assert "error" not in found, f"{method}: {found['error']}"
                    result: dict[str, Any] = found["result"]
                    return result
                if found.get("method") == "Fetch.requestPaused":
                    headers = [{"name": "content-type", "value": "text/html; charset=utf-8"}]
                    id = found["params"]["requestId"]
                    given = {"responseCode": 200, "responseHeaders": headers, "body": self._html}
                    await self._send("Fetch.fulfillRequest", requestId=id, **given)

    async def _send(self, method: str, **params: Any) -> int:
        self._sent += 1
        await self._ws.send_json({"id": self._sent, "method": method, "params": params, **self._session})
        return self._sent


@asynccontextmanager
async def opened(address: str, html: str | None = None, *, folder: Path) -> AsyncIterator[Page]:
    """The page at `address`, or `html` in its place, in a browser of its own."""
    await asyncio.to_thread(see_that_it_is_installed, PROGRAM)
    command = [PROGRAM, *OPTIONS, f"--user-data-dir={folder / 'chromium'}"]
    guard = await asyncio.create_subprocess_exec(
        "sh", "-c", GUARD, "guard", *command, stdin=PIPE, stderr=PIPE, start_new_session=True
    )
    assert guard.stderr is not None
    try:
        async with asyncio.timeout(STARTED_S):
            told = await _address(guard.stderr)
        reading = asyncio.create_task(_read_on(guard.stderr), name="chromium's log")
        async with aiohttp.ClientSession() as session, session.ws_connect(told, max_msg_size=0) as ws:
            page = Page(ws, html)
            await page.open(address)
            yield page
        reading.cancel()
    finally:
        guard.stdin.close()  # type: ignore[union-attr]
        await guard.wait()


async def _address(log: asyncio.StreamReader) -> str:
    """Where its DevTools listen."""
    lines = []
    async for line in log:
        lines.append(line)
        if found := _LISTENS.search(line):
            return found[1].decode()
    raise AssertionError(f"chromium ended: {b''.join(lines[-20:]).decode(errors='replace')}")


async def _read_on(log: asyncio.StreamReader) -> None:
    """A full pipe would stop it."""
    while await log.read(1 << 16):
        pass


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
    environ = environment(vhost, LANEKEEPER_LANES__BATCH__SLOTS="2")
    async with lanekeeper("serve", "--simulate", environ=environ, folder=tmp_path) as served, requester(vhost) as app:
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
