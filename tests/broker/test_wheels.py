"""Wheels and source distributions; each wheel in an environment of its own: the client's beside an application's own
packages `service`, `topology` and `consumers`, with the newest and the oldest versions of what it needs."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import lanekeeper
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.serving import serving

pytestmark = pytest.mark.slow
HOUSE = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
OWN = ("service", "topology", "consumers")
NOT_NEEDED = {"anthropic", "fsspec", "jiter", "opentelemetry", "pydantic", "redis", "structlog", "typer", "uvloop"}
FOR_AMQP, FOR_HTTP = {"aio_pika", "aiormq", "pamqp"}, {"aiohttp"}
SCRIPT = """
import asyncio, json, sys
import consumers, service, topology
from lanekeeper import Client, Problem

async def main():
    async with Client(sys.argv[1]) as client:
        id = await client.publish({"prompt": "published"}, key="normal.tests.wheel")
        answer = await client.request({"prompt": service.PROMPT}, key="normal.tests.wheel")
        parts = [each async for each in client.stream({"prompt": "two words"}, key="normal.tests.wheel")]
        published = await client.result(id, wait_s=30)
        try:
            await client.request({"prompt": ""}, key="normal.tests.wheel")
        except Problem as problem:
            code = problem.code
    print(json.dumps({
        "told": [published.text, answer.text, parts[-1].text, code],
        "own": [each.__file__ for each in (consumers, service, topology)],
        "loaded": sorted({name.partition(".")[0] for name in sys.modules}),
    }))

asyncio.run(main())
"""


def built(folder: Path, into: Path) -> Path:
    (wheel,) = WheelBuilder(str(folder)).build(directory=str(into), versions=["standard"])
    return Path(wheel)


def install(place: Path, *line: str | Path) -> Path:
    """An environment with what `uv pip install` gets from the package index; prints what is in it."""
    venv.create(place)
    python = place / "bin/python"
    said = subprocess.run([UV, "pip", "install", "--python", python, *line], capture_output=True, text=True)
    if said.returncode and re.search("(?i)network|connect|dns|fetch", said.stderr) and os.environ.get("CI") != "true":
        pytest.skip(f"no package index: {said.stderr}")
    assert said.returncode == 0, said.stderr
    subprocess.run([UV, "pip", "list", "--python", python], check=True)
    return python


@pytest.mark.parametrize("versions", ["highest", "lowest-direct"])
async def test_an_application_with_packages_of_the_same_names_uses_the_client(
    vhost: Vhost, tmp_path: Path, versions: str
) -> None:
    wheel = built(HOUSE / "lanekeeper", tmp_path)
    python = await asyncio.to_thread(install, tmp_path / "environment", "--resolution", versions, wheel)
    project = tmp_path / "project"
    for package in OWN:
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").write_text("PROMPT = 'ours'\n")
    (project / "app.py").write_text(SCRIPT)

    async with serving(vhost) as worker, gate(worker) as gateway:
        for url, not_needed in ((vhost.amqp_url, FOR_HTTP), (gateway, FOR_AMQP)):
            script = await asyncio.create_subprocess_exec(python, "app.py", url, cwd=project, stdout=PIPE, stderr=PIPE)
            said, err = await script.communicate()

            assert err == b""
            found = json.loads(said)
            assert found["told"] == ["echo: published", "echo: ours", "echo: two words", "invalid_request"]
            assert {Path(each).parent.parent for each in found["own"]} == {project}
            assert set(found["loaded"]) & (NOT_NEEDED | not_needed) == set()


def test_the_service_is_installed_with_the_client_of_its_version(tmp_path: Path) -> None:
    wheels = built(HOUSE, tmp_path), built(HOUSE / "lanekeeper", tmp_path)
    python = install(tmp_path / "environment", *wheels)
    run = subprocess.run(
        [python.parent / "lanekeeper", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout == f"lanekeeper {lanekeeper.__version__}\n"


def test_each_wheel_has_its_packages_types_and_licence(tmp_path: Path) -> None:
    for folder, packages in ((HOUSE, OWN), (HOUSE / "lanekeeper", ("lanekeeper",))):
        with zipfile.ZipFile(built(folder, tmp_path)) as wheel:
            held = {name for name in wheel.namelist() if ".dist-info/" not in name}
            licence = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
        assert {name.partition("/")[0] for name in held} == set(packages)
        assert {f"{package}/py.typed" for package in packages} <= held
        assert len(licence) == 1
    assert f'"lanekeeper-client=={lanekeeper.__version__}"' in (HOUSE / "pyproject.toml").read_text()


def test_the_wheel_of_each_source_distribution_is_that_of_the_checkout(tmp_path: Path) -> None:
    for number, folder in enumerate((HOUSE, HOUSE / "lanekeeper")):
        place = tmp_path / str(number)
        (packed,) = SdistBuilder(str(folder)).build(directory=str(place), versions=["standard"])
        with tarfile.open(packed) as archive:
            archive.extractall(place / "unpacked", filter="data")
        (unpacked,) = (place / "unpacked").iterdir()
        with zipfile.ZipFile(built(unpacked, place)) as one, zipfile.ZipFile(built(folder, tmp_path)) as other:
            assert {name: one.read(name) for name in one.namelist()} == {
                name: other.read(name) for name in other.namelist()
            }


FLASK = """
from flask_view import app

with app.test_client() as browser:
    asked = browser.post("/ask", json={"prompt": "three rivers"})
    wrong = browser.post("/ask", json={"prompt": ""})
    story = browser.post("/story", json={"prompt": "once upon"})
    print(asked.json, wrong.status_code, wrong.json["error"], story.text)
"""
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
CELERY = "from celery_task import summarise; print(summarise.delay('a long text').get(timeout=60))"


async def test_the_examples_with_flask_and_celery(vhost: Vhost, tmp_path: Path) -> None:
    wheel = built(HOUSE / "lanekeeper", tmp_path)
    python = await asyncio.to_thread(install, tmp_path / "environment", wheel, "flask", "celery")
    environ = {**os.environ, "AMQP_URL": vhost.amqp_url, "PYTHONPATH": str(HOUSE / "examples/python")}
    environ["C_FORCE_ROOT"] = "1"

    async def said(*line: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *ENDS_WITH_US, python, *line, cwd=tmp_path, env=environ, stdout=PIPE
        )
        out, _ = await asyncio.wait_for(process.communicate(), 120)
        return out.decode()

    async with serving(vhost):
        assert await said("-c", FLASK) == "{'answer': 'echo: three rivers'} 400 invalid_request echo: once upon\n"
        worker = await asyncio.create_subprocess_exec(
            *ENDS_WITH_US, python, "-m", "celery", "--app", "celery_task", "worker", "--concurrency", "2",
            "--loglevel", "warning", "--without-gossip", "--without-mingle", cwd=tmp_path, env=environ,
        )  # fmt: skip
        try:
            assert await said("-c", CELERY) == "echo: a long text\n"
        finally:
            worker.terminate()
            await asyncio.wait_for(worker.wait(), 30)
