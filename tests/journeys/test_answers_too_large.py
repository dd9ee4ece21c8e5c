"""Where large answers have no store, one that is too large to be sent ends its request at once and delays no other."""

import asyncio
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from service.simulated.app import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.meeting import meeting
from tests.support.redis import redis_server
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until
from topology.lanes import MIB

TOKENS = 4_400_000
"""Four bytes each: more than the 16 MiB that RabbitMQ 4 accepts as one message."""
MANY = 128 * MIB
"""Allowed size of answers, so high that the broker's limit is the one that applies."""
LANES = {"normal": {"slots": 8}}


def huge(name: str) -> dict[str, object]:
    return {"prompt": f"{name} [[tokens: {TOKENS}]]", "max_tokens": TOKENS}


@pytest.fixture
def store_url(tmp_path: Path) -> Iterator[SecretStr]:
    """Redis, with which large bodies have no store unless one is set."""
    with redis_server(tmp_path) as redis:
        yield SecretStr(redis.url)


def takes_it(version: str) -> bool:
    return int(version.split(".")[0]) < 4


@pytest.mark.every_version
@pytest.mark.parametrize(("stream", "deltas"), [(False, 8), (True, 8), (True, 1)], ids=["whole", "parts", "one part"])
async def test_an_answer_over_the_brokers_limit_ends_the_request_at_once_and_is_parked(
    vhost: Vhost, store_url: SecretStr, stream: bool, deltas: int
) -> None:
    """Also if a single event of its stream is over the limit."""
    simulated, results = SimulatedOptions(stream_deltas=deltas), {"answer_bytes": MANY}
    async with meeting(vhost.amqp_url, simulated=simulated, results=results, store_url=store_url) as (worker, app, _):
        await app.read_dead()
        reply = await app.ask(huge("too much"), headers={"x-lane-stream": stream}, message_id="big", within_s=60)
        if takes_it(vhost.version):
            assert reply.status == "ok"
            return
        assert (reply.code, reply.json["status"], reply.json["attempts"]) == ("answer_too_large", 502, 1)
        assert str(16 * MIB) in reply.json["detail"]
        assert "max_tokens" in reply.json["detail"]
        assert "LANEKEEPER_BODIES__URL" in reply.json["detail"]
        dead = await app.buried("big")
        assert dead.headers["x-lane-dead-code"] == "answer_too_large"
        again = await app.ask(huge("too much"), message_id="big")
        assert (again.code, len(worker.calls("too much"))) == ("answer_too_large", 1), "told again, not called again"
        assert not worker.losses


async def test_an_answer_over_our_own_limit_ends_the_same_way_on_every_broker(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, results={"answer_bytes": MIB}) as worker, requester(vhost.amqp_url) as app:
        reply = await app.ask({"prompt": "x [[tokens: 300000]]", "max_tokens": 300_000}, within_s=60)
        assert reply.code == "answer_too_large"
        assert str(MIB) in reply.json["detail"]
        assert "LANEKEEPER_RESULTS__ANSWER_BYTES" in reply.json["detail"]
        fits = await app.ask({"prompt": "y [[tokens: 250000]]", "max_tokens": 300_000}, within_s=60)
        assert (fits.status, len(fits.body) > 999_000) == ("ok", True)
        assert not worker.losses


async def test_eight_too_large_answers_occupy_no_slot_and_affect_no_other_request(
    vhost: Vhost, store_url: SecretStr
) -> None:
    """Afterwards their lane answers others, the publish connection is open, and no part of another stream is lost."""
    quick = {"prompt": "quick"}
    async with (
        serving(vhost.amqp_url, lanes=LANES, results={"answer_bytes": MANY}, store_url=store_url) as worker,
        requester(vhost.amqp_url) as app,
        requester(vhost.amqp_url) as other,
    ):
        await other.ask(quick)
        usual = await other.waits_s(5, pause_s=0.05)
        ids = [await app.publish(huge(f"n {n}"), key="normal.tests.ask", message_id=f"big-{n}") for n in range(8)]
        during = asyncio.create_task(other.waits_s(20, pause_s=0.05))
        streamed = await other.publish({"prompt": "a story [[tokens: 400]]"}, headers={"x-lane-stream": True})
        for each in ids:
            await until(lambda each=each: app.finals(each), within_s=90)
            assert takes_it(vhost.version) or app.finals(each)[0].code == "answer_too_large"
        print(f"waits of others: usual {max(usual):.3f} s, meanwhile {sorted(await during)[-3:]} s")
        assert statistics.median(await during) < max(2, 10 * max(usual))
        assert (await app.ask(quick, key="normal.tests.ask")).status == "ok"
        await until(lambda: other.finals(streamed))
        parts = [each for each in other.replies[streamed] if each.headers.get("x-lane-part") == "event"]
        assert [each.headers["x-lane-seq"] for each in parts] == list(range(len(parts)))
        assert json.loads(parts[-1].body)["type"] == "message_stop"
        assert not worker.losses
