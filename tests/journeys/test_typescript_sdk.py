"""Anthropic's TypeScript SDK, unmodified, against the gateway and against the API itself: the same answers, the same
errors."""

import asyncio
import json
import re
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.serving import serving

CALLS = Path(__file__).parents[1] / "support" / "typescript"
_ID = re.compile(r'"(id|request_id|_request_id)": "[^"]*"')

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("node") is None or shutil.which("npm") is None,
        reason="node or npm is not installed (Debian: apt install nodejs npm)",
    ),
]


async def finished(*command: str, folder: Path, within_s: float = 120) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(within_s):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        return -1, "", f"not within {within_s:g} s"
    return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture
async def sdk(tmp_path: Path) -> Path:
    """A folder with the SDK in the version of the lock file."""
    folder = tmp_path / "typescript"
    shutil.copytree(CALLS, folder)
    code, _, error = await finished("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=folder)
    if code != 0:
        pytest.skip(f"npm cannot install the SDK: {error.strip()[-200:]}")
    return folder


async def got(sdk: Path, url: str) -> Any:
    """What the SDK got from an API, without what differs from call to call."""
    code, out, error = await finished("node", "calls.js", url, folder=sdk)
    assert code == 0, error
    return json.loads(_ID.sub(r'"\1": ""', json.dumps(json.loads(out))))


async def test_it_gets_the_same_from_the_gateway_as_from_the_api(vhost: Vhost, sdk: Path) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        ours, own = await got(sdk, url), await got(sdk, worker.api.base_url)

    for part in own:
        assert ours[part] == own[part], part
    assert {kind["type"] for kind in own["final"]["tools"]["content"]} >= {"tool_use"}
    assert {kind["type"] for kind in own["final"]["thinking"]["content"]} >= {"thinking"}
    assert [each["status"] for each in own["errors"].values()] == [404, 404, 400, 400, 529, 529]
