"""The broker dies, closes connections, raises an alarm or loses a queue, under load: no confirmed request is lost, and
a worker makes no call whose answer it could not send.

Counted by request id. How long recovery took is printed (`pytest -s`)."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from lanekeeper import Client, ReplyLost
from lanekeeper.contract.problems import BrokerUnreachable, ConfirmUnknown
from service.simulated.app import SimulatedOptions
from tests.support.brokers import Vhost, memory_alarm
from tests.support.private_broker import PrivateBroker
from tests.support.processes import environment, lanekeeper
from tests.support.requester import Ledger, requester
from tests.support.serving import HeldCalls, serving
from tests.support.waiting import until
from topology.broker.admin import apply

SHORT_MS = 20_000
"""A delay that ends while the broker is down; its start takes longer."""
LONG_MS = 60_000
"""A delay that ends after the broker is back."""
SETTLED_S = 4.0
"""How old a quorum queue must be to survive: RabbitMQ 4.3.6 comes back with an empty one where it was declared less
than a second before the SIGKILL, whatever it had confirmed (tried: 20 of 20 lost at once, none at 1 s). No client can
see when it is safe."""


async def ask_all(ledger: Ledger) -> None:
    """Requests that will be queued, running, waiting for a retry or delayed when the broker is killed. They are
    published at once, so that the short delays do not end before that."""
    retried = "[[fault: server_error retry_after=8 x1]]"
    short, long = {"x-lane-delay-ms": SHORT_MS}, [{"x-lane-delay-ms": LONG_MS + 100 * n} for n in range(20)]
    await asyncio.gather(
        *(ledger.ask("batch", f"queued {n} [[latency: 500ms]]", id=f"queued-{n}") for n in range(80)),
        *(ledger.ask("normal", f"delayed long {n}", id=f"long-{n}", headers=long[n]) for n in range(20)),
        *(ledger.ask("critical", f"delayed briefly {n}", id=f"short-{n}", headers=short) for n in range(20)),
        *(ledger.ask("critical", f"running {n} [[latency: 10s]]", id=f"running-{n}") for n in range(4)),
        *(ledger.ask("normal", f"retried {n} {retried}", id=f"retried-{n}") for n in range(4)),
    )


@pytest.mark.every_version
async def test_when_the_broker_is_killed_no_request_is_lost_and_the_worker_recovers_by_itself(
    own_broker: PrivateBroker,
) -> None:
    ledger = Ledger(own_broker.amqp_url)
    async with serving(own_broker, lanes={"batch": {"slots": 1}}) as own:
        async with requester(own_broker) as watching, ledger.writing():
            await watching.read_events()
            await asyncio.sleep(SETTLED_S)
            asked = time.monotonic()
            await ask_all(ledger)
            put_off = [f"{kind}-{n}" for kind in ("short", "long") for n in range(20)]
            await until(lambda: all("deferred" in watching.events_of(each) for each in put_off))
            await until(lambda: all("retrying" in watching.events_of(f"retried-{n}") for n in range(4)))
            await until(lambda: len(own.calls("running")) == 4 and own.calls("queued"))

            queues = [queue.name for queue in own.parts.broker.topology.queues if queue.name.startswith("lane.batch")]

            async def has_a_backlog() -> bool:  # wherever it waits: a busy worker sets it aside
                return sum([await watching.depth(queue) for queue in queues]) > 20

            await until(has_a_backlog)
            assert time.monotonic() - asked < SHORT_MS / 1000, "the machine is too slow for this test"
            await own_broker.kill()
        died = time.monotonic()
        await until(lambda: len(own.losses) == 2)
        assert own.parts.reasons()["consume connection"], "whoever asks is told"
        await asyncio.sleep(max(0, asked + SHORT_MS / 1000 + 0.5 - time.monotonic()))  # the short delays end meanwhile
        await own_broker.start()
        back = time.monotonic()
        assert back - asked < LONG_MS / 1000, "the long delays end after it came back"

        async with ledger.reading():
            await until(lambda: not any(own.parts.reasons().values()))
            well = time.monotonic()
            await until(lambda: ledger.finals)
            first = time.monotonic()
            await until(lambda: not ledger.lost, within_s=120)
        ledger.check()
        print(
            f"down {back - died:.1f} s; all queues consumed {well - back:.2f} s after it was back, first answer "
            f"{first - back:.2f} s; {len(ledger.confirmed)} requests, {ledger.repeated} replies twice, "
            f"{len(own.api.calls) - len(ledger.confirmed) - 4} calls beyond those needed"
        )
        assert well - back < 60
        for n in range(20):
            due_s = asked + (LONG_MS + 100 * n) / 1000
            calls = own.calls(f"delayed long {n}")
            assert calls[0].started_s > due_s - 0.1, "not before it was due"
            assert calls[0].started_s < max(due_s, well) + 40


async def test_a_publish_while_the_broker_is_away_fails_with_an_error_or_succeeds_later(
    own_broker: PrivateBroker,
) -> None:
    async with (
        serving(own_broker) as own,
        Client(own_broker.amqp_url, publish_within_s=3) as hasty,
        Client(own_broker.amqp_url, publish_within_s=60) as patient,
    ):
        assert (await hasty.request({"prompt": "before"}, key="critical.tests.x", timeout_s=60)).text == "echo: before"
        await asyncio.sleep(SETTLED_S)
        hanging = asyncio.create_task(hasty.request({"prompt": "[[fault: hang]]"}, key="critical.tests.x"))
        await until(lambda: own.calls("hang"))
        await own_broker.kill()
        with pytest.raises(ReplyLost, match="ask again"):
            await hanging
        with pytest.raises((BrokerUnreachable, ConfirmUnknown), match=r"127\.0\.0\.1|connection lost"):
            await hasty.publish({"prompt": "now"}, key="critical.tests.x")
        later = asyncio.create_task(patient.request({"prompt": "later"}, key="critical.tests.x", timeout_s=60))
        await own_broker.start()
        assert (await later).text == "echo: later"
        await until(lambda: hasty.trouble is None)  # it opens its connection by itself
        again = await hasty.request({"prompt": "again"}, key="critical.tests.x", timeout_s=60)
        assert again.text == "echo: again"


async def test_a_worker_process_reports_not_ready_without_a_broker_and_recovers_by_itself(
    own_broker: PrivateBroker, tmp_path: Path
) -> None:
    ledger = Ledger(own_broker.amqp_url)
    async with HeldCalls() as api:
        environ = environment(own_broker, api, LANEKEEPER_LANES__BATCH__SLOTS="4")
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker, aiohttp.ClientSession() as http:
            url = await worker.ready()
            await until(lambda: is_status(http, f"{url}/readyz", 200))
            async with ledger.writing():
                await asyncio.sleep(SETTLED_S)
                for n in range(40):
                    await ledger.ask("batch", f"job {n} [[held]]", id=f"job-{n}")
                await until(lambda: api.running == 4)
                await own_broker.kill()
            await until(lambda: is_status(http, f"{url}/readyz", 503))
            _, told = await asked_of(http, f"{url}/readyz")
            assert told["ready"] is False
            assert "consume connection" in told["reasons"]
            assert (
                "127.0.0.1" in told["reasons"]["consume connection"] or "lost" in told["reasons"]["consume connection"]
            )
            assert await asked_of(http, f"{url}/healthz") == (200, {"alive": True}), "alive, and not to be restarted"

            api.release()
            await own_broker.start()
            back = time.monotonic()
            await until(lambda: is_status(http, f"{url}/readyz", 200))
            print(f"ready again {time.monotonic() - back:.2f} s after the broker was back")
            async with ledger.reading():
                await until(lambda: not ledger.lost)
            ledger.check()
            assert len(api.calls) <= 40 + 2 * 5, "repeated is what ran, or was on its way to the broker, and no more"
            worker.send(signal.SIGTERM)
            assert await worker.ended() == 0


async def test_connections_closed_by_an_administrator_cause_at_most_a_repeated_call(vhost: Vhost) -> None:
    ledger = Ledger(vhost.amqp_url)
    options = SimulatedOptions(latency_ms=1500)
    async with serving(vhost, simulated=options, lanes={"batch": {"slots": 8}}) as own:
        async with ledger.writing(), ledger.reading():
            closed: set[str] = set()
            for which in ("consume", "publish", "consume"):
                of_that_name = connections_named(vhost, f"lanekeeper {which}", closed)
                (name,) = await until(lambda of_that_name=of_that_name: asyncio.to_thread(of_that_name))
                asked = len(ledger.confirmed)
                jobs = range(asked, asked + 24)
                await asyncio.gather(*(ledger.ask("batch", f"job {n:02d}", id=f"job-{n}") for n in jobs))
                await until(lambda: own.api.running >= 4)
                loss = own.parts.broker.consuming.loss if which == "consume" else own.parts.broker.publishing.loss
                await asyncio.to_thread(vhost.api, "DELETE", f"connections/{quote(name, safe='')}")
                closed.add(name)
                assert "CONNECTION_FORCED" in await asyncio.wait_for(asyncio.shield(loss), timeout=60)
                before = time.monotonic()
                await until(lambda: not any(own.parts.reasons().values()))
                print(f"{which}: well again after {time.monotonic() - before:.2f} s")
            await until(lambda: not ledger.lost)
        ledger.check()
        called = Counter(call.prompt for call in own.api.calls)
        assert max(called.values()) <= 3, "a call is repeated at most once for each loss of the consuming connection"
        # What a scout had copied to the side queue, but not acknowledged, is delivered twice, and called once.
        in_hand = 10
        assert called.total() <= 3 * 24 + 2 * in_hand, "what was in hand on the consuming connection, and nothing else"


@pytest.mark.oldest_version
async def test_a_deleted_queue_makes_the_worker_unready_until_it_is_declared_again(vhost: Vhost) -> None:
    """Its content is lost, which cannot be prevented; but the loss must be reported."""
    async with serving(vhost, declares=False) as own, requester(vhost) as app:
        await asyncio.to_thread(vhost.api, "DELETE", f"queues/{vhost.quoted}/lane.normal")
        trouble = await until(lambda: "topology apply" in (own.parts.reasons()["queue lane.normal"] or ""))
        assert trouble
        await until(lambda: "lane.normal is missing" in (own.parts.reasons()["topology"] or ""))
        assert (await app.ask({"prompt": "the others go on"}, key="batch.tests.x")).status == "ok"
        lost = await app.ask({"prompt": "nowhere to go"}, key="normal.tests.x")
        assert lost.code == "unroutable"
        await apply(own.parts.broker.topology, await own.parts.broker.publishing.underlying())
        await until(lambda: not any(own.parts.reasons().values()))
        assert (await app.ask({"prompt": "back"}, key="normal.tests.x")).status == "ok"


def connections_named(vhost: Vhost, name: str, closed: set[str]) -> Callable[[], list[str]]:
    """Returns a function that finds the client's connections by name. The management API lists new ones a little late,
    and may list closed ones a little longer."""

    def look() -> list[str]:
        listed = vhost.api("GET", f"vhosts/{vhost.quoted}/connections")
        return [
            each["name"] for each in listed if each.get("user_provided_name") == name and each["name"] not in closed
        ]

    return look


async def asked_of(http: aiohttp.ClientSession, url: str) -> tuple[int, dict[str, Any]]:
    async with http.get(url) as answer:
        return answer.status, await answer.json()


async def is_status(http: aiohttp.ClientSession, url: str, status: int) -> bool:
    return (await asked_of(http, url))[0] == status


SLOW = {"critical": {"slots": 2, "slots_max": 2}}
REQUESTS = 20


async def test_during_an_alarm_nothing_is_started_and_afterwards_every_request_is_answered_once(
    own_broker: PrivateBroker,
) -> None:
    async with serving(own_broker, lanes=SLOW) as worker, requester(own_broker) as app:
        for n in range(REQUESTS):
            await app.publish({"prompt": f"ask {n} [[held]]"}, correlation_id=f"{n}")
        await until(lambda: worker.api.running == 2)
        async with memory_alarm(own_broker.amqp_url):
            worker.api.release("ask 0")  # a broker tells of its alarm only those who publish
            await until(lambda: all(pool.is_paused for pool in worker.parts.pools))
            worker.api.release()
            begun = len(worker.api.calls)
            await asyncio.sleep(2)
            assert len(worker.api.calls) == begun < REQUESTS, "a call was made whose answer could not be sent"
            assert worker.parts.reasons()["publish connection"] == "low on memory"
        over_s = time.monotonic()
        await until(lambda: worker.is_well)
        print(f"all queues consumed {time.monotonic() - over_s:.2f} s after the alarm")
        for n in range(REQUESTS):
            assert (await app.final(f"{n}")).status == "ok"
        assert len(worker.api.calls) == REQUESTS


@pytest.mark.oldest_version
async def test_while_a_worker_cannot_publish_it_takes_no_request_and_reports_why(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        assert (await app.ask({"prompt": "before"})).status == "ok"
        rights = f"permissions/{vhost.quoted}/{vhost.user}"
        vhost.api("DELETE", rights)  # so that it does not reconnect
        await (await worker.parts.broker.publishing.underlying()).close()
        await until(lambda: all(pool.is_paused for pool in worker.parts.pools))
        asked = await app.publish({"prompt": "meanwhile"})
        await until(lambda: "not into virtual host" in (worker.parts.reasons()["publish connection"] or ""))
        await asyncio.sleep(0.5)
        assert not worker.calls("meanwhile")

        vhost.api("PUT", rights, {"configure": ".*", "write": ".*", "read": ".*"})
        assert (await app.final(asked)).status == "ok"
        await until(lambda: not any(worker.parts.reasons().values()))
        assert len(worker.calls("meanwhile")) == 1
