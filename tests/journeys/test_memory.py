"""A worker with 512 MiB, the limit in deploy/kubernetes, takes whatever is sent to its queues: it is not killed, and
each request is answered or refused. The test prints the most memory that the worker used so far after each part."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from consumers.flows.webhooks import Post
from lanekeeper.contract import names as n
from lanekeeper.contract.names import Names
from tests.support.brokers import Vhost
from tests.support.endpoint import Endpoint, endpoint
from tests.support.limited import cgroup
from tests.support.processes import Running, environment, interpreter, run
from tests.support.requester import Requester, requester
from tests.support.serving import HELD, HeldCalls
from tests.support.waiting import until

MIB = 1024 * 1024
LIMIT_BYTES = 512 * MIB
KEY = "normal.tests.ask"
SETTINGS = {
    "LANEKEEPER_GRACE_S": "1",
    "LANEKEEPER_SPEAKERS": "guest",
    "LANEKEEPER_LANES__NORMAL__SLOTS": "4",
    "LANEKEEPER_LANES__NORMAL__SIDE_QUEUES": "8",
    "LANEKEEPER_LANES__NORMAL__SLOTS_MAX": "4",
    "LANEKEEPER_LANES__BATCH__BATCHES__ENABLED": "true",
}
pytestmark = pytest.mark.slow


class Limited:
    """A worker with little memory, its provider, and an application."""

    def __init__(self, running: Running, api: HeldCalls, app: Requester) -> None:
        self.running = running
        self.api = api
        self.app = app

    def report(self, what: str) -> int:
        """Print and return the most memory that it used, in MiB."""
        assert not self.running.has_ended, f"{what}: ended with {self.running.process.returncode}"
        status = Path(f"/proc/{self.running.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        most_mib = int(line.split()[1]) // 1024
        print(f"{what}: at most {most_mib} MiB")
        return most_mib


@asynccontextmanager
async def limited(vhost: Vhost, folder: Path, hook: Endpoint) -> AsyncIterator[Limited]:
    with cgroup(LIMIT_BYTES) as group:
        async with HeldCalls() as api, requester(vhost) as app:
            api.batches.fail("create", "hang x1000")
            environ = environment(vhost, api, CGROUP=str(group or ""), **SETTINGS, **hook.environment())
            assert (await run("topology", "apply", environ=environ, folder=folder))[0] == 0
            for begin in range(0, GATHERED, 50):
                await asyncio.gather(*(_publish_gathered(app, f"m-{number}") for number in range(begin, begin + 50)))
            async with interpreter(
                "consume", environ=environ, folder=folder, module="tests.support.limited"
            ) as running:
                await running.ready()
                print(f"in a cgroup: {group}")
                yield Limited(running, api, app)
                running.send(signal.SIGTERM)
                assert await running.ended() == 0


@pytest.mark.timeout(900)  # of more than two minutes on a busy machine
async def test_a_worker_with_512_mebibytes_is_not_killed_and_answers_all(vhost: Vhost, tmp_path: Path) -> None:
    async with endpoint() as hook, limited(vhost, tmp_path, hook) as worker:
        worker.report("started")
        app = worker.app
        running = await app.publish({"prompt": f"neighbour {HELD}"}, key=KEY, headers={n.TENANT: "neighbour"})
        await until(lambda: worker.api.running)
        await gathered(worker)
        await large(worker)
        await aside(worker)
        await control(worker)
        await webhooks(worker, hook)
        worker.api.release("neighbour")
        assert (await app.final(running)).status == "ok"
        assert worker.report("end") < LIMIT_BYTES // MIB
        assert len(worker.api.calls) == len({call.prompt for call in worker.api.calls}), "none was called twice"


GATHERED = 1500
LONG = os.urandom(90_000).hex() + "x" * 55_000


async def gathered(worker: Limited) -> None:
    """What waits in the queue for batches when the worker starts, 335 MiB, and its tickets, while the provider takes no
    batch: the rest goes on beside what follows."""

    async def are_in_tickets() -> bool:
        return await worker.app.depth("lane.tickets") >= 2

    await until(are_in_tickets)
    worker.report("1,500 requests of 235 KB are gathered")


async def large(worker: Limited) -> None:
    """On a lane whose slots are in use, so that scouts look for requests of other tenants."""
    app = worker.app
    held = [
        await app.publish({"prompt": f"l-{number} {HELD}"}, key=KEY, headers={n.TENANT: f"l-{number % 3}"})
        for number in range(60)
    ]
    await until(lambda: worker.api.running == 4)
    body = os.urandom(10 * MIB)
    refused = [await app.publish(body, key=KEY, headers={n.TENANT: "large"}) for _ in range(60)]
    for each in refused:
        reply = await app.final(each)
        assert (reply.code, str(len(body)) in reply.json["detail"]) == ("too_large", True)
    worker.api.release("l-")
    assert {(await app.final(each)).status for each in held} == {"ok"}
    worker.report("60 requests of 10 MiB are refused")


async def aside(worker: Limited) -> None:
    """The largest that are allowed, of ten tenants."""
    app, sides = worker.app, [f"lane.normal.side.{number:02}" for number in range(8)]
    text = os.urandom(MIB // 2 - 100).hex()
    bodies = [{"prompt": f"s-{number} {HELD}{text}"} for number in range(60)]
    asked = [
        await app.publish(body, key=KEY, headers={n.TENANT: f"s-{number % 10}"}) for number, body in enumerate(bodies)
    ]

    async def are_aside() -> bool:
        return sum([await app.depth(side) for side in sides]) > 30

    await until(are_aside)
    worker.api.release("s-")
    assert {(await app.final(each)).status for each in asked} == {"ok"}
    worker.report("60 requests of 1 MiB are set aside and answered")


async def control(worker: Limited) -> None:
    app, body = worker.app, b'{"cancel": "' + b"x" * (10 * MIB) + b'"}'
    asked = [await app.publish(body, exchange="lane.control", key="cancel", message_type="cancel") for _ in range(12)]
    for each in asked:
        await until(lambda each=each: app.replies[each])
        assert app.replies[each][0].code == "invalid_request"
    worker.report("12 control messages of 10 MiB are refused")


async def webhooks(worker: Limited, hook: Endpoint) -> None:
    """Outcomes for an endpoint that takes its time, so that many are under way."""
    hook.answer = lambda posted: 0.5
    for number in range(16):
        post = Post(
            url=hook.url(), id=f"w-{number}", status="ok", routing_key=KEY, content_type="application/json", tenant=""
        )
        outcome = b"x" * (12 * MIB)
        await worker.app.publish(
            outcome, exchange="lane.webhooks", key=Names().webhook_key("normal"), headers=post.headers()
        )
    await until(lambda: len({post.id for post in hook.posts}) == 16)
    worker.report("16 outcomes of 12 MiB are posted")


async def _publish_gathered(app: Requester, id: str) -> None:
    now_ms = int(time.time() * 1000)
    body = {"model": "claude-haiku-5-5", "max_tokens": 10, "messages": [{"role": "user", "content": id + LONG}]}
    batch = {
        "account": "anthropic/haiku", "provider": "anthropic", "model": "claude-haiku-5-5", "tokens": 20,
        "deadline_ms": now_ms + 86_400_000, "tenant": "",
    }  # fmt: skip
    headers = {n.BATCH: json.dumps(batch), n.ROUTING_KEY: "batch.tests.ask", n.FIRST_SEEN_MS: now_ms}
    await app.publish(body, exchange="", key="lane.batches", headers=headers, message_id=id, reply_to=None)
