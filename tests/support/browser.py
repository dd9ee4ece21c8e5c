"""Pages in a browser: Chromium, by its DevTools. `opened` gives a page, and `Seen` what somebody sees there, and the
keys that they press."""

import asyncio
import base64
import json
import re
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.engine import GUARD, see_that_it_is_installed
from tests.support.waiting import STARTED_S, until

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
    """One page. Whatever it asks its reader to confirm is confirmed."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, html: str | None) -> None:
        self._ws = ws
        self._html = None if html is None else base64.b64encode(html.encode()).decode()
        self._session: dict[str, str] = {}
        self._sent = 0
        self.confirmed: list[str] = []
        """What it asked, in order."""

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

    async def resize(self, *, width: int, height: int) -> None:
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        await self._ask("Emulation.setDeviceMetricsOverride", **size)

    async def picture(self, *, width: int, height: int, dark: bool) -> bytes:
        await self.resize(width=width, height=height)
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
        await self._ask("Page.enable")
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
                if found.get("method") == "Page.javascriptDialogOpening":
                    self.confirmed.append(found["params"]["message"])
                    await self._send("Page.handleJavaScriptDialog", accept=True)
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
