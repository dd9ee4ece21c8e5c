"""Our client with a worker and a real broker: answers, parts, problems, and a connection that is cut."""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lanekeeper import Client, NoReply, ReplyLost
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import depths
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import AccessRefused, BrokerUnreachable, PublishRefused, TopologyMismatch
from lanekeeper.options import Options
from lanekeeper.replies import Final, Part, Problem
from service.simulated.options import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.connections import close_connection
from tests.support.lanes import LANES
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until
from topology.broker.admin.apply import apply
from topology.declaration import declare


@asynccontextmanager
async def at_home(url: str, **how: Any) -> AsyncIterator[Client]:
    async with serving(url, **how), Client(url) as client:
        yield client


async def test_an_answer_has_its_text_and_its_headers(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url) as client:
        answer = await client.request({"prompt": "three rivers"}, key="normal.tests.client", message_id="id-1")

    assert answer.text == "echo: three rivers"
    assert (answer.request_id, answer.lane, answer.attempt) == ("id-1", "normal", 1)
    assert answer.message["role"] == "assistant"
    assert answer.provider


async def test_a_hundred_concurrent_requests_each_get_their_own_answer(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url) as client:
        asked = [client.request({"prompt": f"number {n}"}, key="critical.tests.client") for n in range(100)]
        answers = await asyncio.gather(*asked)

    assert [answer.text for answer in answers] == [f"echo: number {n}" for n in range(100)]


async def test_a_stream_gives_its_parts_in_order_and_then_the_whole_answer(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url) as client:
        came = [each async for each in client.stream({"prompt": "three rivers"}, key="critical.tests.client")]

    *parts, last = came
    assert isinstance(last, Final)
    assert all(isinstance(part, Part) for part in parts)
    assert [part.seq for part in parts if isinstance(part, Part)] == list(range(len(parts)))
    assert "".join(part.text for part in parts if isinstance(part, Part)) == last.text == "echo: three rivers"


async def test_a_stream_that_is_left_early_leaves_nothing_behind(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url) as client:
        stream = client.stream({"prompt": "three rivers"}, key="critical.tests.client")
        await anext(stream)
        await stream.aclose()

        assert (await client.request({"prompt": "again"}, key="critical.tests.client")).text == "echo: again"


async def test_a_failed_attempt_gives_a_restart_in_the_stream(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url) as client:
        prompt = "one two three four five six seven eight [[fault: cut x1]]"
        came = [each async for each in client.stream({"prompt": prompt}, key="critical.tests.client")]

    kinds = [each.kind for each in came if isinstance(each, Part)]
    assert kinds.count("restart") == 1
    assert kinds[0] == "event"
    after = came[kinds.index("restart") :]
    assert isinstance(came[-1], Final)
    assert "".join(each.text for each in after if isinstance(each, Part)) == came[-1].text


async def test_an_error_is_raised_with_the_fields_of_its_document(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url) as client:
        with pytest.raises(Problem) as caught:
            await client.request(
                {"prompt": "x", "model": "claude-nope"}, key="critical.tests.client", message_id="id-2"
            )
        with pytest.raises(Problem, match="unroutable"):
            await client.request({"prompt": "x"}, key="nolane.tests.client")

    assert (caught.value.code, caught.value.status, caught.value.request) == ("provider_rejected", 404, "id-2")
    assert caught.value.attempts == 1


@pytest.mark.oldest_version
async def test_delay_and_start_time_are_kept(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url) as client:
        began = time.monotonic()
        delayed = client.request({"prompt": "a"}, key="normal.tests.client", delay_s=0.5)
        later = datetime.now(UTC) + timedelta(seconds=1)
        timed = client.request({"prompt": "b"}, key="normal.tests.client", at=later)

        async def took(asked: "asyncio.Future[Final]") -> float:
            await asked
            return time.monotonic() - began

        first, second = await asyncio.gather(took(asyncio.ensure_future(delayed)), took(asyncio.ensure_future(timed)))

    assert 0.5 <= first < 15
    assert 0.9 <= second < 15


async def test_publish_returns_the_id_and_the_request_is_worked_on(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:
        made = await client.publish({"prompt": "fire"}, key="batch.tests.client")
        assert await client.publish({"prompt": "forget"}, key="batch.tests.client", message_id="mine") == "mine"

        await until(lambda: worker.calls("fire") and worker.calls("forget"))

    assert len(made) == 32


async def test_the_options_are_in_the_message(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url, works=("critical",)),
        requester(vhost.amqp_url) as app,
        Client(vhost.amqp_url) as client,
    ):
        seen: list[object] = []
        channel = await app.connection.channel()

        async def keep(message: object) -> None:
            seen.append(message)

        await channel.basic_consume("lane.batch", keep, no_ack=True)
        before_ms = time.time() * 1000
        await client.publish(
            {"prompt": "x"}, key="batch.tests.client", deadline_s=30, beta="b-1", headers={"x-app": "mine"}
        )
        after_ms = time.time() * 1000
        await until(lambda: seen)

    properties = seen[0].header.properties  # type: ignore[attr-defined]
    assert properties.priority == 4
    assert properties.delivery_mode == 2
    assert properties.headers["x-lane-deadline-ms"] == 30_000
    assert properties.headers["anthropic-beta"] == "b-1"
    assert properties.headers["x-app"] == "mine"
    assert before_ms - 1 <= properties.headers["x-lane-sent-ms"] <= after_ms + 1


async def test_without_an_answer_in_the_callers_time_an_error_is_raised_and_the_request_forgotten(vhost: Vhost) -> None:
    async with at_home(vhost.amqp_url, simulated=SimulatedOptions(latency_ms=1000)) as client:
        with pytest.raises(NoReply, match=r"within 0\.2 s"):
            await client.request({"prompt": "slow"}, key="critical.tests.client", timeout_s=0.2)


async def test_a_stream_whose_connection_is_lost_raises_at_once_and_the_next_request_is_answered(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, Client(vhost.amqp_url) as client:

        async def read() -> None:
            async for _ in client.stream({"prompt": "slow [[latency: 60s]]"}, key="critical.tests.client"):
                pass

        reading = asyncio.create_task(read())
        await until(lambda: worker.calls("slow"))
        await close_connection(vhost, "lanekeeper client")

        with pytest.raises(ReplyLost, match="ask again under the same id"):
            await asyncio.wait_for(reading, 60)
        assert (await client.request({"prompt": "again"}, key="critical.tests.client")).text == "echo: again"


@pytest.mark.parametrize("options", [{}, {"message_id": "mine"}])
async def test_an_answer_whose_connection_was_lost_is_fetched_by_its_id(vhost: Vhost, options: Options) -> None:
    async with (
        serving(vhost.amqp_url, simulated=SimulatedOptions(latency_ms=8000)) as worker,
        Client(vhost.amqp_url) as client,
    ):
        asked = asyncio.create_task(
            client.request({"prompt": "slow"}, key="critical.tests.client", timeout_s=60, **options)
        )
        await until(lambda: worker.calls("slow"))
        await close_connection(vhost, "lanekeeper client")

        assert (await asked).text == "echo: slow"
        assert len(worker.calls("slow")) == 1


async def test_after_a_lost_connection_a_conflict_of_ids_is_still_raised(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url, lanes={"normal": {"slots": 1}}) as worker,
        Client(vhost.amqp_url) as client,
    ):
        await client.request({"prompt": "one"}, key="critical.tests.client", message_id="same")
        await client.publish({"prompt": "[[latency: 8s]]"}, key="normal.tests.client")
        await until(lambda: worker.api.running == 1)
        asked = asyncio.create_task(
            client.request({"prompt": "two"}, key="normal.tests.client", message_id="same", timeout_s=60)
        )
        await close_connection(vhost, "lanekeeper client")

        with pytest.raises(Problem, match="idempotency_conflict"):
            await asked


@pytest.mark.oldest_version
async def test_a_full_lane_is_reported_soon_and_by_name(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url, works=("critical",), lanes={"batch": {"max_length": 2}}),
        Client(vhost.amqp_url) as client,
    ):
        began = 0.0

        async def fill() -> None:
            nonlocal began
            for n in range(50):  # a quorum queue notices late that it is full
                began = time.monotonic()
                await client.publish({"prompt": f"{n}"}, key="batch.tests.client")

        with pytest.raises(PublishRefused, match=r"the lane is full: lane\.batch holds \d+ requests.* try again later"):
            await fill()
        assert time.monotonic() - began < 15
        assert (await client.request({"prompt": "x"}, key="critical.tests.client", timeout_s=60)).text == "echo: x"


async def test_without_a_worker_fetching_a_result_times_out_and_a_cancellation_is_kept_at_once(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanekeeper.control.ANSWERED_WITHIN_S", 0.3)
    async with Connection(vhost.amqp_url, name="test") as connection:
        topology = declare(LANES, names=Names(), broker_version=connection.version)
        await apply(topology, await connection.underlying())
        async with Client(vhost.amqp_url) as client:
            with pytest.raises(NoReply, match="no worker answered"):
                await client.result("id-1")
            monkeypatch.setattr("lanekeeper.control.ANSWERED_WITHIN_S", 3600)
            with pytest.raises(NoReply, match="no worker runs; it is recorded as soon as one runs"):
                await client.cancel("id-1")

        async def depth() -> int:
            return (await depths(connection, ["lane.control"]))["lane.control"].ready

        async def only_the_cancellation_is_left() -> bool:
            return await depth() == 1

        await until(only_the_cancellation_is_left)


async def test_the_number_of_workers_of_a_lane_can_be_read(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, works=("critical",)), Client(vhost.amqp_url) as client:
        critical, batch, none = [await client.depth(lane) for lane in ("critical", "batch", "nolane")]

    assert critical is not None
    assert batch is not None
    assert (critical.consumers, batch.consumers, none) == (1, 0, None)


async def test_a_client_can_be_left_at_any_moment(vhost: Vhost) -> None:
    for n in range(60):
        async with asyncio.timeout(60), Client(vhost.amqp_url):
            await asyncio.sleep(n / 3000)  # also while it connects


async def test_without_a_topology_the_error_says_at_once_what_to_run(vhost: Vhost) -> None:
    async with Client(vhost.amqp_url) as client:
        began = time.monotonic()
        with pytest.raises(TopologyMismatch, match="lanekeeper topology apply"):
            await client.publish({"prompt": "x"}, key="batch.tests.client")
        with pytest.raises(TopologyMismatch, match="lanekeeper topology apply"):
            await client.result("id-1", wait_s=30)
        assert time.monotonic() - began < 15


async def test_an_unreachable_broker_and_a_wrong_password_are_different_errors(vhost: Vhost) -> None:
    with pytest.raises(BrokerUnreachable):
        async with Client("amqp://guest:guest@127.0.0.1:1/"):
            pass
    with pytest.raises(AccessRefused):
        async with Client(
            vhost.amqp_url.replace(":guest@", ":wrong@")
            if ":guest@" in vhost.amqp_url
            else vhost.amqp_url.replace("@", "x@", 1)
        ):
            pass


async def test_without_configured_logging_a_script_prints_only_its_own_lines(vhost: Vhost) -> None:
    script = (
        "import asyncio, sys\n"
        "from lanekeeper import Client\n"
        "async def main():\n"
        "    async with Client(sys.argv[1]) as client:\n"
        "        await asyncio.to_thread(sys.stdin.readline)\n"
        "        await client.depth('normal')\n"
        "        print('mine')\n"
        "asyncio.run(main())\n"
    )

    async def said(*before: str) -> tuple[str, str]:
        line = (sys.executable, "-W", "ignore", "-c", "".join((*before, script)), vhost.amqp_url)
        process = await asyncio.create_subprocess_exec(
            *line, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=Path(__file__).parents[2]
        )
        await close_connection(vhost, "lanekeeper client")
        out, err = await process.communicate(b"\n")
        return out.decode(), err.decode()

    assert await said() == ("mine\n", "")
    out, err = await said("import logging; logging.basicConfig(level=logging.INFO)\n")
    assert out == "mine\n"
    assert "INFO:lanekeeper:event='broker.connected'" in err
