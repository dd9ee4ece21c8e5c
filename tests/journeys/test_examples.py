"""The examples do what docs/clients.md says. Those in Python are run; the others are only read.

Go, TypeScript and Java are run by hand, as the table in docs/clients.md tells: their tools download what they need.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.support.brokers import Vhost
from tests.support.serving import serving
from tests.support.waiting import STARTED_S, until

HOUSE = Path(__file__).parents[2]
EXAMPLES = HOUSE / "examples"
EVERYTHING = (
    "python/control.py",
    "python/client.py",
    "go/main.go",
    "typescript/lane.ts",
    "java/src/main/java/lane/Lane.java",
)


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
    async with serving(vhost.amqp_url):
        asked = await asyncio.gather(
            run(vhost, "ask.py", "three rivers"),
            run(vhost, "stream.py", "three rivers"),
            run(vhost, "client.py", "ask", "three rivers"),
            run(vhost, "client.py", "stream", "three rivers"),
        )

    assert list(asked) == [(0, "echo: three rivers\n", "")] * 4


async def test_the_python_examples_fetch_and_cancel(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker:
        code, out, _ = await run(vhost, "client.py", "publish", "slow [[latency: 110s]]")
        id = out.strip()
        await until(lambda: worker.calls("slow"))
        code, out, _ = await run(vhost, "control.py", "result", id)
        assert (code, out.strip()) == (0, "running")
        code, _, err = await run(vhost, "client.py", "result", id)
        assert (code, "running" in err) == (1, True)
        code, out, _ = await run(vhost, "control.py", "cancel", id)
        assert (code, out.strip()) == (0, "told")
        await until(lambda: worker.calls("slow")[0].outcome == "client_gone")
        assert await run(vhost, "client.py", "cancel", id) == (0, "ended\n", "")

        code, _, err = await run(vhost, "control.py", "result", id)
        assert (code, err) == (1, "Cancelled: cancelled by its owner while it ran\n")
        code, _, err = await run(vhost, "control.py", "result", "no id")
        assert (code, "can be no request's id" in err) == (1, True)
