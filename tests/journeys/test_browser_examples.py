"""The browser programs in docs/clients.md follow a request to its end."""

import re
from pathlib import Path

import pytest

from tests.support.brokers import Vhost
from tests.support.chromium import opened
from tests.support.gate import gate
from tests.support.serving import serving
from tests.support.sources import ROOT
from tests.support.waiting import STARTED_S, until

PROGRAMS = re.findall(r"```typescript\n(.*?)```", (ROOT / "docs/clients.md").read_text(), re.DOTALL)
PAGE = "<!doctype html><script>const told = []; console.log = (...said) => told.push(JSON.stringify(said));</script>"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("chromium")]


@pytest.mark.parametrize("program", PROGRAMS, ids=["EventSource", "WebSocket"])
async def test_an_example_prints_the_answer(vhost: Vhost, tmp_path: Path, program: str) -> None:
    async with (
        serving(vhost.amqp_url) as worker,
        gate(worker.settings) as url,
        opened(f"{url}/page", PAGE, folder=tmp_path) as page,
    ):
        await page.value(f"(async () => {{ {program} }})(), 0")
        await until(
            lambda: page.value("told.some((said) => said.includes('echo: Tell me a story.'))"), within_s=STARTED_S
        )
        assert len(worker.calls("Tell me a story.")) == 1
