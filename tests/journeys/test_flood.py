"""A flood in the batch lane delays no higher lane; inside a lane, higher priorities go first."""

import asyncio
import time
from collections import Counter

import pytest

from service.simulated.app import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.requester import Requester, requester
from tests.support.serving import serving
from tests.support.waiting import until

JOBS = 300
CHATS = 30
"""Requests in each of the two higher lanes."""
LATENCY_MS = 300
BLOCK = "[[latency: 90s]] in the way"
"""Has the only slot until it is cancelled, when the others have been published."""
SMALL = {"slots": 1, "side_queues": 0}
"""One slot, and nothing is set aside, so that the order of calls is the lane's order."""


def sent() -> dict[str, int]:
    return {"x-lane-sent-ms": time.time_ns() // 1_000_000}


@pytest.mark.timing
async def test_higher_lanes_do_not_wait_for_a_flood_in_the_batch_lane(vhost: Vhost) -> None:
    async with (
        serving(
            vhost.amqp_url, simulated=SimulatedOptions(latency_ms=LATENCY_MS), lanes={"batch": {"slots": 12}}
        ) as worker,
        requester(vhost.amqp_url) as app,
    ):
        flood = await asyncio.gather(
            *(app.publish({"prompt": f"job {n}"}, key="batch.tests.flood", headers=sent()) for n in range(JOBS))
        )
        await until(lambda: worker.api.running == 12)

        chats: dict[str, list[str]] = {"critical": [], "normal": []}
        for n in range(CHATS):
            for lane, asked in chats.items():
                asked.append(await app.publish({"prompt": f"{lane} {n}"}, key=f"{lane}.tests.chat", headers=sent()))
            await asyncio.sleep(0.05)  # a pause as between messages that people type; it waits for nothing
        waits = {lane: [await wait_of(app, each) for each in asked] for lane, asked in chats.items()}
        left = sum(not app.finals(each) for each in flood)
        waits["batch"] = [await wait_of(app, each) for each in flood]

        p95 = {lane: sorted(each)[int(len(each) * 0.95)] for lane, each in waits.items()}
        for lane, each in waits.items():
            print(f"{lane}: waited p50 {sorted(each)[len(each) // 2]}, p95 {p95[lane]}, max {max(each)} ms")
        assert left > JOBS / 4, "the chats were answered among the flood, not after it"
        assert p95["batch"] > 3000, "the flood was one"
        assert p95["critical"] < 700, "some of it is the machine, which runs other tests as well"
        assert p95["normal"] < 1500
        assert p95["critical"] * 10 < p95["batch"]
        asked_twice = [
            prompt for prompt, calls in Counter(call.prompt for call in worker.api.calls).items() if calls > 1
        ]
        assert not asked_twice
        assert {len(app.finals(each)) for each in [*flood, *chats["critical"], *chats["normal"]]} == {1}


async def wait_of(app: Requester, asked: str) -> int:
    """How long a request waited, according to its reply; checks that the reply is to this request."""
    reply = await app.final(asked)
    assert reply.status == "ok", reply
    return int(reply.headers["x-lane-wait-ms"])


@pytest.mark.parametrize(("stuck", "free"), [("critical", "batch"), ("batch", "critical")])
async def test_requests_of_a_stuck_lane_never_use_another_lanes_own_slots(vhost: Vhost, stuck: str, free: str) -> None:
    """However urgent the stuck lane is, the others continue with their own slots."""
    lanes = {"critical": {"slots": 2}, "normal": {"slots": 2}, "batch": {"slots": 2}}
    async with serving(vhost.amqp_url, lanes=lanes) as worker, requester(vhost.amqp_url) as app:
        held = [
            await app.publish({"prompt": f"held {n} [[latency: 90s]]"}, key=f"{stuck}.tests.x", message_id=f"held-{n}")
            for n in range(6)
        ]
        await until(lambda: worker.api.running == 2)
        for n in range(5):
            assert (await app.ask({"prompt": f"free {n}"}, key=f"{free}.tests.x")).status == "ok"
        assert len(worker.calls("held")) == 2
        assert not any(app.finals(each) for each in held)
        for n in range(6):
            await app.control({"cancel": f"held-{n}"}, key="cancel")


@pytest.mark.every_version
@pytest.mark.parametrize("shuffled", [False, True], ids=["low first", "mixed"])
async def test_inside_a_lane_higher_priorities_go_first(vhost: Vhost, shuffled: bool) -> None:
    """Strictly from 4.3 on and before 4.0. From 4.0 to 4.2 there are two classes, and the higher one gets the larger
    share."""
    priorities = [n % 10 for n in range(40)] if shuffled else sorted(n % 10 for n in range(40))
    async with serving(vhost.amqp_url, lanes={"normal": SMALL}) as worker, requester(vhost.amqp_url) as app:
        await app.publish({"prompt": BLOCK}, key="normal.tests.x", priority=9, message_id="block")
        await until(lambda: worker.api.running == 1)
        asked = [
            await app.publish({"prompt": f"p{priority} n{n:02d}"}, key="normal.tests.x", priority=priority)
            for n, priority in enumerate(priorities)
        ]
        await app.control({"cancel": "block"}, key="cancel")
        for each in asked:
            assert (await app.final(each)).status == "ok"

        worked = [call.prompt for call in worker.api.calls][1:]
        strictly = sorted(worked, key=lambda words: (-int(words[1]), words))
        if is_strict(vhost.version):
            assert worked == strictly
        else:
            places = {words: place for place, words in enumerate(worked)}
            high = [place for words, place in places.items() if int(words[1]) > 4]
            low = [place for words, place in places.items() if int(words[1]) <= 4]
            assert sum(high) / len(high) < sum(low) / len(low) - 5
            for of_class in (sorted(high), sorted(low)):
                in_class = [worked[place] for place in of_class]
                assert in_class == sorted(in_class, key=lambda words: words[-2:]), "first in, first out in a class"


@pytest.mark.every_version
async def test_a_missing_priority_counts_as_4_or_0(vhost: Vhost) -> None:
    """4 in a quorum intake, 0 in a classic one: docs/facts.md, section 1."""
    async with serving(vhost.amqp_url, lanes={"normal": SMALL}) as worker, requester(vhost.amqp_url) as app:
        await app.publish({"prompt": BLOCK}, key="normal.tests.x", priority=9, message_id="block")
        await until(lambda: worker.api.running == 1)
        asked = [await app.publish({"prompt": "unsaid"}, key="normal.tests.x")]
        asked += [await app.publish({"prompt": f"said {p}"}, key="normal.tests.x", priority=p) for p in (1, 3, 5, 6)]
        await app.control({"cancel": "block"}, key="cancel")
        for each in asked:
            await app.final(each)

        worked = [call.prompt for call in worker.api.calls][1:]
        if not is_strict(vhost.version):
            assert worked.index("unsaid") < worked.index("said 1"), "of the lower class, and first in it"
        elif vhost.version.startswith("3."):
            assert worked == ["said 6", "said 5", "said 3", "said 1", "unsaid"]
        else:
            assert worked == ["said 6", "said 5", "unsaid", "said 3", "said 1"]


def is_strict(version: str) -> bool:
    return not version.startswith(("4.0", "4.1", "4.2"))
