"""What an application with our client gets on standard error when its broker goes away and comes back."""

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import aiormq
import pytest

from lanekeeper.amqp.connection import Connection
from service.private_broker import PrivateBroker
from tests.support.brokers import Vhost
from tests.support.waiting import STARTED_S

APPLICATION = """
import asyncio, logging, sys
from lanekeeper import Client

class Opened(logging.Handler):
    def emit(self, record):
        if "broker.connected" in record.getMessage():
            print("connected", flush=True)

async def main():
    async with Client(sys.argv[1]):
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

if sys.argv[2] == "configured":
    logging.basicConfig(level=logging.WARNING)
heard = logging.getLogger("lanekeeper")
heard.setLevel(logging.INFO)
heard.addHandler(Opened())
asyncio.run(main())
"""


async def test_a_restart_of_the_broker_prints_no_traceback_with_or_without_configured_logging(
    own_broker: PrivateBroker,
) -> None:
    root = str(Path(__file__).parents[2])
    said = {}
    processes = {
        how: await asyncio.create_subprocess_exec(
            sys.executable, "-c", APPLICATION, own_broker.amqp_url, how, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=root
        )
        for how in ("silent", "configured")
    }
    for process in processes.values():
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readuntil(b"ready\n"), STARTED_S)
    await own_broker.kill()
    await own_broker.start()
    for how, process in processes.items():
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readuntil(b"connected\n"), STARTED_S)
        _, err = await asyncio.wait_for(process.communicate(b"\n"), STARTED_S)
        said[how] = err.decode()
    assert said["silent"] == ""
    lines = said["configured"].splitlines()
    assert any("broker.lost" in line for line in lines)
    assert not [line for line in lines if ":lanekeeper:" not in line]


async def test_aiormqs_own_log_lines_are_kept_for_the_applications_other_connections(
    vhost: Vhost, caplog: pytest.LogCaptureFixture
) -> None:
    async with Connection(vhost.amqp_url, name="ours"):
        with caplog.at_level(logging.WARNING), pytest.raises(aiormq.exceptions.AMQPConnectionError):
            await aiormq.connect("amqp://guest:guest@127.0.0.1:1/")
    assert [record.name for record in caplog.records] == ["aiormq.connection"]
