"""Other AMQP clients: pika, amqp-tools in a shell, and the examples in Python. `./dev interop` runs those in all
languages."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pika
import pytest

from tests.support.brokers import Vhost
from tests.support.serving import serving
from tests.support.waiting import STARTED_S, until

WITHIN_S = 60


def install_amqp_tools() -> None:
    """Install Debian's amqp-tools if they are missing and available."""
    if shutil.which("amqp-publish") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "-qq", "update"], ["apt-get", "-qq", "-y", "install", "amqp-tools"]):
            subprocess.run(command, check=False, capture_output=True, timeout=120)
    if shutil.which("amqp-publish") is None:
        if os.environ.get("CI"):
            pytest.fail("amqp-publish is missing: install amqp-tools")
        pytest.skip("amqp-publish is missing: install amqp-tools")


def pika_asks(url: str, reply_to: str, requests: list[tuple[str, Any, dict[str, Any]]]) -> dict[str, list[Any]]:
    """Like any application with pika: publish all requests, then collect their final replies."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    replies: dict[str, list[Any]] = {}
    finals = 0

    def keep(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        nonlocal finals
        replies.setdefault(properties.correlation_id, []).append((properties, body))
        finals += "x-lane-status" in properties.headers

    try:
        channel = connection.channel()
        queue = reply_to or channel.queue_declare("", exclusive=True).method.queue
        channel.basic_consume(queue, keep, auto_ack=True)
        if not reply_to:
            channel.confirm_delivery()
        for number, (key, body, headers) in enumerate(requests):
            properties = pika.BasicProperties(
                content_type="application/json",
                reply_to=queue,
                correlation_id=f"c-{number}",
                message_id=f"m-{number}",
                delivery_mode=2,
                headers=headers,
            )
            channel.basic_publish("lane.requests", key, json.dumps(body).encode(), properties, mandatory=not reply_to)
        stop = threading.Timer(WITHIN_S, lambda: connection.add_callback_threadsafe(connection.close))
        stop.start()
        while finals < len(requests):
            connection.process_data_events(time_limit=1)
        stop.cancel()
        return replies
    finally:
        if connection.is_open:
            connection.close()


@pytest.mark.oldest_version
@pytest.mark.parametrize("reply_to", ["", "amq.rabbitmq.reply-to"], ids=["exclusive queue", "direct reply-to"])
async def test_an_application_with_pika_is_answered(vhost: Vhost, reply_to: str) -> None:
    requests: list[tuple[str, Any, dict[str, Any]]] = [
        ("critical.shop.chat", {"prompt": "whole"}, {}),
        ("normal.shop.chat", {"prompt": "in parts"}, {"x-lane-stream": True}),
        ("batch.shop.chat", {"prompt": "again [[fault: overloaded x2]]"}, {"x-lane-deadline-ms": 60_000}),
        ("critical.shop.chat", {"prompt": "later"}, {"x-lane-delay-ms": 300}),
        ("critical.shop.chat", {"prompt": "never [[fault: invalid]]"}, {}),
        ("critical.shop.chat", {"nonsense": 1}, {}),
    ]
    async with serving(vhost):
        replies = await asyncio.to_thread(pika_asks, vhost.amqp_url, reply_to, requests)

    finals = {name: [each for each in got if "x-lane-status" in each[0].headers] for name, got in replies.items()}
    assert {name: len(each) for name, each in finals.items()} == {f"c-{n}": 1 for n in range(len(requests))}
    answers = [json.loads(finals[f"c-{n}"][0][1]) for n in range(len(requests))]
    assert [answer["content"][0]["text"].split(" [[")[0] for answer in answers[:4]] == [
        "echo: whole",
        "echo: in parts",
        "echo: again",
        "echo: later",
    ]
    assert [answer["code"] for answer in answers[4:]] == ["provider_rejected", "invalid_request"]
    parts = [properties.headers["x-lane-seq"] for properties, _ in replies["c-1"][:-1]]
    assert parts == list(range(len(parts)))
    assert len(parts) > 4
    assert finals["c-2"][0][0].headers["x-lane-attempt"] == 3
    assert {finals[f"c-{n}"][0][0].headers["x-lane-request-id"] for n in range(6)} == {f"m-{n}" for n in range(6)}


async def test_a_shell_script_publishes_and_reads_the_answer(vhost: Vhost) -> None:
    """amqp-publish sends no message id, and all headers as strings."""
    install_amqp_tools()
    async with serving(vhost) as worker:
        url = ["-u", vhost.amqp_url]
        await shell(["amqp-declare-queue", *url, "-q", "shell.answers"])
        publish = ["amqp-publish", *url, "-e", "lane.requests", "-t", "shell.answers", "-p"]
        await shell(
            [*publish, "-r", "critical.shell.ask", "-C", "application/json", "-b", '{"prompt": "from a shell"}']
        )
        answer = json.loads(await shell(["amqp-consume", *url, "-q", "shell.answers", "-c", "1", "cat"]))
        assert answer["content"][0]["text"] == "echo: from a shell"

        await shell([*publish, "-r", "normal.shell.ask", "-H", "x-lane-delay-ms: 200", "-b", '{"prompt": "later"}'])
        answer = json.loads(await shell(["amqp-consume", *url, "-q", "shell.answers", "-c", "1", "cat"]))
        assert answer["content"][0]["text"] == "echo: later"

        await shell([*publish, "-r", "normal.shell.ask", "-H", "x-lane-dealy-ms: 200", "-b", '{"prompt": "typo"}'])
        problem = json.loads(await until(lambda: shell(["amqp-get", *url, "-q", "shell.answers"], check=False)))
        assert problem["code"] == "invalid_request"
        assert "x-lane-delay-ms" in problem["detail"]

        await shell([*publish, "-r", "shell.nowhere", "-b", '{"prompt": "where?"}'])
        problem = json.loads(await shell(["amqp-consume", *url, "-q", "shell.answers", "-c", "1", "cat"]))
        assert problem["code"] == "unroutable"
        assert len(worker.api.calls) == 2


async def shell(command: list[str], *, check: bool = True) -> bytes:
    """The output of a command, which is stopped if it takes too long."""
    running = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, error = await asyncio.wait_for(running.communicate(), WITHIN_S)
    except TimeoutError:
        running.kill()
        await running.wait()
        raise
    assert not check or running.returncode == 0, (command[0], error)
    return out


HOUSE = Path(__file__).parents[2]
EXAMPLES = HOUSE / "examples"


async def run(vhost: Vhost, example: str, *line: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / "python" / example),
        *line,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "AMQP_URL": vhost.amqp_url, "PYTHONPATH": str(HOUSE)},
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout=STARTED_S)
    return process.returncode, out.decode(), err.decode()


async def test_the_python_examples_send_and_stream(vhost: Vhost) -> None:
    async with serving(vhost):
        asked = await asyncio.gather(
            run(vhost, "lane.py", "ask", "three rivers"),
            run(vhost, "lane.py", "stream", "three rivers"),
            run(vhost, "client.py", "ask", "three rivers"),
            run(vhost, "client.py", "stream", "three rivers"),
        )

    assert [(code, out) for code, out, _ in asked] == [(0, "echo: three rivers\n")] * 4


async def test_the_python_examples_fetch_and_cancel(vhost: Vhost) -> None:
    async with serving(vhost) as worker:
        code, out, _ = await run(vhost, "client.py", "publish", "slow [[latency: 110s]]")
        id = out.strip()
        await until(lambda: worker.calls("slow"))
        code, out, _ = await run(vhost, "lane.py", "result", id)
        assert (code, out.strip()) == (0, "running")
        code, _, err = await run(vhost, "client.py", "result", id)
        assert (code, "running" in err) == (1, True)
        code, out, _ = await run(vhost, "lane.py", "cancel", id)
        assert (code, out.strip()) == (0, "told")
        await until(lambda: worker.calls("slow")[0].outcome == "client_gone")
        assert await run(vhost, "client.py", "cancel", id) == (0, "ended\n", "")

        code, _, err = await run(vhost, "lane.py", "result", id)
        assert (code, err) == (1, "Cancelled: cancelled by its owner while it ran\n")
        code, _, err = await run(vhost, "lane.py", "result", "no id")
        assert (code, "can be no request's id" in err) == (1, True)
