"""The page's script, with what it gets from a gateway."""

from importlib.resources import files
from pathlib import Path

import pytest
from aiohttp import web

from tests.support.browser import opened

pytestmark = pytest.mark.slow
FOUND = """{
    "tenants": {"normal": {"__proto__": {"running": 1, "in_hand": 2}, "constructor": {"running": 3, "in_hand": 1}}},
    "spent": {"tenant": {"__proto__": {"requests": 4, "usd": 0.5}}}
}"""


async def test_names_that_every_object_of_javascript_has_are_names_like_others(tmp_path: Path) -> None:
    app = web.Application()
    folder = Path(str(files("service"))) / "page"

    async def index(_: web.Request) -> web.StreamResponse:
        return web.FileResponse(folder / "index.html")

    app.router.add_get("/", index)
    app.router.add_static("/", folder)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with opened(f"http://127.0.0.1:{runner.addresses[0][1]}/", folder=tmp_path) as page:
            await page.value(f"tenants(JSON.parse(`{FOUND}`))")
            rows = (
                "[...document.querySelectorAll('#tenants tr')].map(row => [...row.cells].map(cell => cell.textContent))"
            )
            assert (await page.value(rows))[1:] == [
                ["__proto__", "2", "1", "–", "4", "$0.5000"],
                ["constructor", "1", "3", "–", "0", "$0.0000"],
            ]
            assert await page.value("Object.keys(Object.prototype)") == []
            edit = 'merged(JSON.parse(`{"a": 1, "constructor": 2}`), JSON.parse(`{"a": 1, "__proto__": 3}`))'
            assert await page.value(f"JSON.stringify({edit})") == '{"constructor":null,"__proto__":3}'
    finally:
        await runner.cleanup()
