"""A worker with 512 MiB, the limit in deploy/kubernetes, takes whatever is sent to its queues: it is not killed, and
each request is answered or refused. The test prints the most memory that the worker used so far after each part."""

import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from consumers.flows.webhooks import Post
from lanekeeper.bodies import BodyStore
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
    "LANEKEEPER_LANES__NORMAL__CALL_TIMEOUT_S": "600",  # the neighbour is called all the time
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
async def limited(
    vhost: Vhost,
    folder: Path,
    settings: Mapping[str, str],
    *,
    before: Callable[[Requester], Awaitable[None]] | None = None,
) -> AsyncIterator[Limited]:
    """`before`: publishes what waits when the worker starts."""
    with cgroup(LIMIT_BYTES) as group:
        async with HeldCalls() as api, requester(vhost) as app:
            api.batches.fail("create", "hang x1000")
            environ = environment(vhost, api, CGROUP=str(group or ""), **{**SETTINGS, **settings})
            assert (await run("topology", "apply", environ=environ, folder=folder))[0] == 0
            if before is not None:
                await before(app)
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
    async with endpoint() as hook, limited(vhost, tmp_path, hook.environment(), before=publish_gathered) as worker:
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


LOADED = """
[handlers.mebibytes]
run = "tests.support.functions:mebibytes"
kind = "async"

[[pipelines.large.steps]]
name = "lots"
each = "input"
handler = "mebibytes"
"""


@pytest.mark.timeout(600)
async def test_what_a_worker_loads_for_its_requests_is_bounded_as_well(vhost: Vhost, tmp_path: Path) -> None:
    """Bodies that lie in a store, the outcomes that a fan-out joins, and answers that are asked for again."""
    (tmp_path / "lanekeeper.toml").write_text(LOADED)
    store = BodyStore(f"file://{tmp_path}/bodies")
    settings = {
        "LANEKEEPER_BODIES__ALLOW": store.url,
        "LANEKEEPER_LANES__NORMAL__SLOTS": "32",
        "LANEKEEPER_LANES__NORMAL__SLOTS_MAX": "32",
        "LANEKEEPER_BODIES__ANSWERS_OVER_BYTES": str(12 * MIB),
    }
    with TemporaryDirectory(dir="/var/tmp") as disk:  # files in memory would count against the limit
        settings["LANEKEEPER_STORE_URL"] = f"sqlite:///{disk}/store.sqlite"
        async with limited(vhost, tmp_path, settings) as worker:
            worker.report("started")
            app, image = worker.app, base64.b64encode(os.urandom(MIB * 3 // 4)).decode()
            source = {"type": "base64", "media_type": "image/png", "data": image}
            content = [*([{"type": "image", "source": source}] * 30), {"type": "text", "text": "what is this?"}]
            asked = {"model": "claude-haiku-5-5", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
            kept = await store.keep([json.dumps(asked).encode()])
            store.close()
            large = [await app.publish(b"", key=KEY, headers=dict(kept.headers)) for _ in range(24)]
            assert {(await app.final(each, within_s=240)).status for each in large} == {"ok"}
            worker.report("24 requests with bodies of 30 MiB are answered")

            headers = {"x-lane-pipeline": "large"}
            joined = [await app.publish([3, 3], key=KEY, headers=headers, message_id=f"p-{k}") for k in range(24)]
            sizes = {len((await app.final(each, within_s=240)).body) for each in joined}
            assert sizes == {6 * MIB + 7}
            worker.report("24 fan-outs are joined to 6 MiB each")

            async def result(id: str) -> int:
                while True:  # while many are sent, it is told to ask again
                    asked = await app.publish(
                        {"result": id}, exchange="lane.control", key="result", message_type="result"
                    )
                    await until(partial(app.replies.get, asked), within_s=240)
                    (reply,) = app.replies.pop(asked)
                    if reply.status is not None:
                        return len(reply.body)
                    assert reply.code == "too_many_control_messages"

            found = await asyncio.gather(*(result(f"p-{number % 24}") for number in range(100)))
            assert set(found) == {6 * MIB + 7}
            worker.report("100 results of 6 MiB are sent again")
            assert not worker.running.has_ended


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


async def publish_gathered(app: Requester) -> None:
    for begin in range(0, GATHERED, 50):
        await asyncio.gather(*(_publish_gathered(app, f"m-{number}") for number in range(begin, begin + 50)))


async def _publish_gathered(app: Requester, id: str) -> None:
    now_ms = int(time.time() * 1000)
    body = {"model": "claude-haiku-5-5", "max_tokens": 10, "messages": [{"role": "user", "content": id + LONG}]}
    batch = {
        "account": "anthropic/haiku", "provider": "anthropic", "model": "claude-haiku-5-5", "tokens": 20,
        "deadline_ms": now_ms + 86_400_000, "tenant": "",
    }  # fmt: skip
    headers = {n.BATCH: json.dumps(batch), n.ROUTING_KEY: "batch.tests.ask", n.FIRST_SEEN_MS: now_ms}
    await app.publish(body, exchange="", key="lane.batches", headers=headers, message_id=id, reply_to=None)
