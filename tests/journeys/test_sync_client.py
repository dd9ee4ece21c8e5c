"""The client for programs without an event loop: it returns and raises what the other one does, in threads and after a
fork."""

import asyncio
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lanekeeper import Final, NotEnded, Part, Problem
from lanekeeper.contract.problems import ClientMisused
from lanekeeper.sync import Client
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.serving import serving
from tests.support.waiting import until

HOUSE = Path(__file__).parents[2]
KEY = "normal.tests.sync"
FORKED = """
import json, os, sys
from lanekeeper.sync import Client

client = Client(sys.argv[1])
texts = [client.request({"prompt": "before"}, key="normal.tests.fork").text]
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, client.request({"prompt": "in the child"}, key="normal.tests.fork").text.encode())
    os._exit(0)
texts.append(os.read(read, 10_000).decode())
texts.append(client.request({"prompt": "after"}, key="normal.tests.fork").text)
client.close()
print(json.dumps(texts))
"""
INTERRUPTED = """
import sys
from lanekeeper.sync import Client

with Client(sys.argv[1]) as client:
    print("asking", flush=True)
    client.request({"prompt": "[[latency: 60s]] x"}, key="normal.tests.interrupted", message_id="interrupted")
"""


def outcomes(client: Client) -> list[Any]:
    """Called in a thread: the tests' own thread runs the worker."""
    with client:
        answer = client.request({"prompt": "three rivers"}, key=KEY)
        parts = list(client.stream({"prompt": "three rivers"}, key=KEY))
        later = client.result(client.publish({"prompt": "later"}, key=KEY), wait_s=60)
        failed = []
        for ask in (
            lambda: client.request({"prompt": ""}, key=KEY),
            lambda: list(client.stream({"prompt": ""}, key=KEY)),
        ):
            with pytest.raises(Problem) as problem:
                ask()
            failed.append(problem.value.code)
        with pytest.raises(NotEnded):
            client.result("never")
        assert client.trouble is None
    with pytest.raises(ClientMisused, match="is closed"):
        client.publish({"prompt": "x"}, key=KEY)
    said = "".join(part.text for part in parts if isinstance(part, Part))
    last = parts[-1]
    assert isinstance(last, Final)
    return [bool(answer.text), said == last.text, bool(later.text), failed]


async def test_every_method_does_what_it_does_in_the_asynchronous_client(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as gateway:
        for url in (vhost.amqp_url, gateway):
            assert await asyncio.to_thread(outcomes, Client(url)) == [True, True, True, ["invalid_request"] * 2]


async def test_many_threads_share_one_client(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url):
        with ThreadPoolExecutor(16) as threads, closing(Client(vhost.amqp_url)) as client:

            def ask(number: int) -> str:
                return client.request({"prompt": f"number {number}"}, key=KEY).text

            loop = asyncio.get_running_loop()
            texts = await asyncio.gather(*(loop.run_in_executor(threads, ask, number) for number in range(64)))
            assert len(texts) == 64
            assert all(texts)
            await asyncio.to_thread(client.close)


async def script(text: str, url: str, folder: Path) -> asyncio.subprocess.Process:
    (folder / "script.py").write_text(text)
    return await asyncio.create_subprocess_exec(
        sys.executable, folder / "script.py", url, stdout=-1, env={**os.environ, "PYTHONPATH": str(HOUSE)}
    )


async def test_a_client_made_before_a_fork_works_in_both_processes(vhost: Vhost, tmp_path: Path) -> None:
    async with serving(vhost.amqp_url):
        process = await script(FORKED, vhost.amqp_url, tmp_path)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
        assert len([text for text in json.loads(out) if text]) == 3


async def test_an_interrupted_request_is_cancelled(vhost: Vhost, tmp_path: Path) -> None:
    async with serving(vhost.amqp_url) as worker:
        process = await script(INTERRUPTED, vhost.amqp_url, tmp_path)
        await until(lambda: worker.api.running)
        process.send_signal(signal.SIGINT)
        await until(lambda: not worker.api.running)
        await process.wait()


def test_wrong_parameters_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="api_key"):
        Client("amqp://localhost", api_key="x")


async def test_it_refuses_to_block_an_event_loop(vhost: Vhost) -> None:
    with pytest.raises(ClientMisused, match=r"await lanekeeper\.Client"):
        Client(vhost.amqp_url).publish({"prompt": "x"}, key=KEY)
