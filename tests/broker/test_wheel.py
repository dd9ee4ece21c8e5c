"""An application with its own packages `service`, `topology` and `consumers` uses the client from the wheel."""

import asyncio
import json
import subprocess
import sys
import sysconfig
import venv
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.serving import serving

HOUSE = Path(__file__).parents[2]
OWN = ("service", "topology", "consumers")
FOR_WORKERS = {"anthropic", "jiter", "pydantic", "redis", "typer", "uvloop"}
"""Packages that the client does not import. (structlog imports `rich` if it is installed.)"""
FOR_AMQP, FOR_HTTP = {"aio_pika", "aiormq", "pamqp"}, {"aiohttp"}
SCRIPT = """
import asyncio, json, sys
import consumers, service, topology
from lanekeeper import Client, Problem

async def main():
    async with Client(sys.argv[1]) as client:
        answer = await client.request({"prompt": service.PROMPT}, key="normal.tests.wheel")
        parts = [each async for each in client.stream({"prompt": "two words"}, key="normal.tests.wheel")]
        try:
            await client.request({"prompt": ""}, key="normal.tests.wheel")
        except Problem as problem:
            code = problem.code
    import lanekeeper
    print(json.dumps({
        "text": answer.text, "streamed": parts[-1].text, "code": code, "home": lanekeeper.__file__,
        "own": [each.__file__ for each in (consumers, service, topology)],
        "loaded": sorted({name.partition(".")[0] for name in sys.modules}),
    }))

asyncio.run(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with the wheel; other packages are those of the tests' environment."""
    (wheel,) = WheelBuilder(str(HOUSE)).build(directory=str(tmp_path), versions=["standard"])
    place = tmp_path / "environment"
    venv.create(place)
    (packages,) = place.glob("lib/python*/site-packages")
    # The environment's link to this checkout is not used: our packages come only from the wheel.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    uv = Path(sys.executable).parent / "uv"
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", place / "bin/python", wheel], check=True
    )
    return place


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for package in OWN:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("PROMPT = 'ours'\n")
    (root / "app.py").write_text(SCRIPT)
    return root


async def test_an_application_may_have_packages_with_the_same_names_as_ours(
    vhost: Vhost, environment: Path, project: Path
) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as gateway:
        for url, not_needed in ((vhost.amqp_url, FOR_HTTP), (gateway, FOR_AMQP)):
            script = await asyncio.create_subprocess_exec(
                environment / "bin/python", "app.py", url, cwd=project, stdout=PIPE
            )
            said, _ = await script.communicate()

            found = json.loads(said)
            answered = found["text"], found["streamed"], found["code"]
            assert answered == ("echo: ours", "echo: two words", "invalid_request")
            assert Path(found["home"]).is_relative_to(environment)
            assert {Path(each).parent.parent for each in found["own"]} == {project}
            assert set(found["loaded"]) & (FOR_WORKERS | not_needed) == set()
