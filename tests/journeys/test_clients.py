"""Our client does the same over AMQP, over HTTP, and without an event loop; also as a user made by `topology export`,
which may declare nothing, and where the production profile is on."""

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiormq
import pytest
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from lanekeeper import Client, Final, NotEnded, Part, Problem
from lanekeeper.contract.problems import ClientMisused
from lanekeeper.replies import Final as Reply
from lanekeeper.sync import Client as SyncClient
from tests.support.brokers import Vhost, close_connection
from tests.support.gate import gate
from tests.support.processes import environment, lanekeeper, run
from tests.support.serving import serving
from tests.support.users import Broker, imported_users
from tests.support.waiting import until
from topology.declaration import RECOMMENDED, is_before

KEY = "normal.tests.remote"


async def outcomes(client: Client, ids: str) -> list[Any]:
    """What the calls of a client come to; `ids`: with what the requests' ids begin."""

    def told(final: Reply) -> tuple[Any, ...]:
        return final.text, final.lane, final.model, final.provider, final.attempt

    final = await client.request({"prompt": "three rivers"}, key=KEY, message_id=f"{ids}-1")
    again = await client.request({"prompt": "three rivers"}, key=KEY, message_id=f"{ids}-1")
    parts = [each async for each in client.stream({"prompt": "three rivers"}, key=KEY, message_id=f"{ids}-2")]
    id = await client.publish({"prompt": "later"}, key=KEY, message_id=f"{ids}-3")
    later = await client.result(id, wait_s=60)
    failed: list[Any] = []
    for body, named in (({"prompt": ""}, f"{ids}-4"), ({"prompt": "other"}, f"{ids}-1")):
        with pytest.raises(Problem) as problem:
            await client.request(body, key=KEY, message_id=named)
        failed.append((problem.value.code, problem.value.status))
    with pytest.raises(NotEnded) as unknown:
        await client.result("never")
    return [
        told(final), told(later), again.body == final.body, again.request_id == final.request_id,
        [(each.kind, each.seq, each.text) if isinstance(each, Part) else told(each) for each in parts],
        failed, unknown.value.status, await client.cancel(f"{ids}-1"),
    ]  # fmt: skip


async def test_everything_comes_to_the_same_as_over_amqp(vhost: Vhost) -> None:
    async with (
        serving(vhost) as worker,
        gate(worker) as url,
        Client(vhost.amqp_url) as over_amqp,
        Client(url) as over_http,
    ):
        assert await outcomes(over_http, "h") == await outcomes(over_amqp, "a")


async def test_a_failed_attempt_gives_a_restart_and_the_parts_after_it_are_the_answer(vhost: Vhost) -> None:
    prompt = "one two three four five six seven eight [[fault: cut x1]]"
    async with serving(vhost) as worker, gate(worker) as url, Client(url) as client:
        said = ""
        async for each in client.stream({"prompt": prompt}, key=KEY):
            if isinstance(each, Part):
                said = "" if each.kind == "restart" else said + each.text
        assert isinstance(each, Final)
        assert said == each.text
        assert len(worker.calls("one two")) == 2


async def test_a_gateway_that_restarts_loses_neither_request_nor_part(vhost: Vhost) -> None:
    async with serving(vhost) as worker:
        async with gate(worker) as url:
            client = Client(url)
            await client.__aenter__()
            whole = asyncio.create_task(client.request({"prompt": "[[latency: 4s]] whole"}, key=KEY))
            stream = client.stream({"prompt": "[[latency: 4s]] a story told in many words, one by one"}, key=KEY)
            came = [await anext(stream)]
            await worker.api.until(lambda: len(worker.api.calls) == 2)
        async with gate(worker, port=urlsplit(url).port or 0), aclosing(stream), client:
            came += [each async for each in stream]

            *parts, last = came
            assert [each.seq for each in parts if isinstance(each, Part)] == list(range(len(parts)))
            assert isinstance(last, Final)
            assert "".join(each.text for each in parts if isinstance(each, Part)) == last.text
            assert (await whole).text.endswith("whole")
            assert len(worker.api.calls) == 2


HOUSE = Path(__file__).parents[2]
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


def outcomes_in_a_thread(client: SyncClient) -> list[Any]:
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
    async with serving(vhost) as worker, gate(worker) as gateway:
        for url in (vhost.amqp_url, gateway):
            assert await asyncio.to_thread(outcomes_in_a_thread, SyncClient(url)) == [
                True,
                True,
                True,
                ["invalid_request"] * 2,
            ]


async def test_many_threads_share_one_client(vhost: Vhost) -> None:
    async with serving(vhost):
        with ThreadPoolExecutor(16) as threads, closing(SyncClient(vhost.amqp_url)) as client:

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
    async with serving(vhost):
        process = await script(FORKED, vhost.amqp_url, tmp_path)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
        assert len([text for text in json.loads(out) if text]) == 3


async def test_an_interrupted_request_is_cancelled(vhost: Vhost, tmp_path: Path) -> None:
    async with serving(vhost) as worker:
        process = await script(INTERRUPTED, vhost.amqp_url, tmp_path)
        await until(lambda: worker.api.running)
        process.send_signal(signal.SIGINT)
        await until(lambda: not worker.api.running)
        await process.wait()


async def test_it_refuses_to_block_an_event_loop(vhost: Vhost) -> None:
    with pytest.raises(ClientMisused, match=r"await lanekeeper\.Client"):
        SyncClient(vhost.amqp_url).publish({"prompt": "x"}, key=KEY)


@pytest.fixture
async def users(vhost: Vhost) -> AsyncIterator[Broker]:
    async with imported_users(vhost) as it:
        yield it


@pytest.mark.every_version
async def test_an_application_can_send_and_stream(users: Broker, vhost: Vhost) -> None:
    key = f"normal.{users.app}.chat"
    async with serving(vhost, declares=False), Client(users.url("application")) as client:
        asked = [client.request({"prompt": f"number {n}"}, key=key) for n in range(20)]
        answers = await asyncio.gather(*asked)
        came = [each async for each in client.stream({"prompt": "three rivers"}, key=key)]

    assert [each.text for each in answers] == [f"echo: number {n}" for n in range(20)]
    assert isinstance(came[-1], Final)
    assert len(came) > 2


@pytest.mark.every_version
async def test_a_client_can_cancel_and_fetch(users: Broker, vhost: Vhost) -> None:
    key = f"critical.{users.users['client'].name}.chat"
    async with serving(vhost, declares=False) as running, Client(users.url("client")) as client:
        slow = await client.publish({"prompt": "slow [[latency: 60s]]"}, key=key)
        await until(lambda: running.calls("slow"))
        assert await client.cancel(slow) == "told"
        quick = await client.publish({"prompt": "quick"}, key=key)
        assert (await client.result(quick, wait_s=60)).text == "echo: quick"


@pytest.mark.every_version
async def test_an_application_without_the_right_to_fetch_is_answered_after_it_lost_its_connection(
    users: Broker, vhost: Vhost
) -> None:
    key, prompt = f"normal.{users.app}.chat", {"prompt": "slow [[held]]"}
    async with serving(vhost, declares=False) as running, Client(users.url("application")) as client:
        asked = asyncio.create_task(client.request(prompt, key=key, timeout_s=60))
        await until(lambda: running.calls("slow"))
        assert client.amqp is not None
        loss = client.amqp.connection.loss
        await close_connection(vhost, "lanekeeper client")
        await loss
        running.api.release()

        assert (await asked).text.startswith("echo: slow")
        assert len(running.calls("slow")) == 1, "the provider is not called again"


@pytest.mark.every_version
async def test_apply_creates_a_worker_and_a_client_on_an_empty_broker(vhost: Vhost, tmp_path: Path) -> None:
    mark = secrets.token_hex(4)  # users belong to the whole broker, which other tests share
    worker, app = f"worker-{mark}", f"cli-{mark}"
    users = ("--user", f"{worker}:worker", "--user", f"{app}:client:critical", "--passwords", "passwords")
    try:
        for password in ("first", "second"):  # applied again: the password is now the one in the file
            (tmp_path / "passwords").write_text(f"{worker}:{password}\n{app}:{password}\n")
            environ = environment(vhost)
            code, lines = await run("topology", "apply", *users, environ=environ, folder=tmp_path)
            assert (code, lines[-1]) == (0, f"users: {worker} (worker), {app} (client)")
        url = URL(vhost.amqp_url).with_password("second")
        working = environment(str(url.with_user(worker)))

        async with (
            lanekeeper("consume", "--simulate", environ=working, folder=tmp_path) as process,
            Client(str(url.with_user(app)), identified=True) as client,
        ):
            await process.ready()
            answer = await client.request({"prompt": "three rivers"}, key=f"critical.{app}.chat")
        assert answer.text == "echo: three rivers"

        async with await aiormq.connect(str(url.with_user(worker))) as connection:
            with pytest.raises(ChannelAccessRefused, match="access"):
                await (await connection.channel()).queue_declare("lane.mine", durable=True)
            with pytest.raises(ChannelAccessRefused, match="access"):
                await (await connection.channel()).basic_get(f"lane.reply.{app}")
            channel = await connection.channel()
            with pytest.raises(ChannelAccessRefused, match="access"):
                await channel.basic_publish(b"{}", exchange="lane.control", routing_key="cancel")
    finally:
        for name in (worker, app):
            vhost.api("DELETE", f"users/{name}")


@pytest.mark.parametrize("command", ["serve", "consume"])
async def test_a_worker_that_does_not_meet_the_profile_reports_all_findings_and_does_not_start(
    vhost: Vhost, tmp_path: Path, command: str
) -> None:
    environ = environment(
        vhost.amqp_url, None, LANEKEEPER_PROFILE="production", LANEKEEPER_LOG_CONTENT="true", LANEKEEPER_STORE_URL=""
    )
    async with lanekeeper(command, "--port", "0", environ=environ, folder=tmp_path) as worker:
        assert await worker.ended() == 2
        said = " ".join(each["event"] for each in worker.events)

    assert "not fit for production" in said
    expected = {"log content"}
    if urlsplit(vhost.amqp_url).username == "guest":
        expected.add("broker user")
    if is_before(vhost.version, RECOMMENDED):
        expected.add("broker version")
    assert [each for each in expected if f"{each}:" not in said] == []


@pytest.mark.oldest_version
async def test_an_administrator_is_refused_as_a_workers_user_and_the_role_worker_is_accepted(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with imported_users(vhost) as users:
        plain = {"LANEKEEPER_PROFILE": "production"}
        admin = environment(vhost.amqp_url, None, **plain)
        worker = environment(users.url("worker"), None, **plain)
        found = [await run("check", "--json", "--simulate", environ=each, folder=tmp_path) for each in (admin, worker)]

    rights = [[each for each in json.loads("".join(lines)) if each["what"] == "broker rights"] for _, lines in found]
    assert [[each["well"] for each in each_found] for each_found in rights] == [[False], []]
    assert "topology export --user worker:worker" in rights[0][0]["text"]


async def test_a_request_without_user_id_is_refused_and_one_with_it_belongs_to_that_user(vhost: Vhost) -> None:
    async with (
        imported_users(vhost) as users,
        serving(vhost, declares=False, require_user_id=True),
        Client(users.url("client"), identified=True) as mine,
        Client(users.url("client")) as nobody,
    ):
        key = f"critical.{users.users['client'].name}.chat"
        with pytest.raises(Problem, match="user_id: missing; publish with the property user_id"):
            await nobody.request({"prompt": "x"}, key=key)
        answer = await mine.request({"prompt": "mine"}, key=key, message_id="m-1")
        again = await asyncio.wait_for(mine.result("m-1", wait_s=5), 60)

        assert answer.text == again.text == "echo: mine"
