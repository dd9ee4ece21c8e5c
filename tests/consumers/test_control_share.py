"""A tenant's flood of control messages is refused before the store is asked; those of other tenants are carried out."""

import asyncio
import json
from collections import Counter

import pytest

from consumers import control as messages
from consumers.control import ControlAnswers
from consumers.state.base import Identity
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import AccessRefused
from tests.support.jobs import Bench, FakeDelivery, FakeSession, answers_of, control
from tests.support.virtual_time import virtually

ASKER = "amq.gen-abcdefghijklmnopqrstuv"
BURST = 2  # of five seconds
PER_S = BURST / 5
"""So low that no message is regained while a test runs, however long it takes."""
FLOOD = 200


def cancellations(bench: Bench, *users: str | None, first: int = 1, **said: str) -> list[FakeDelivery]:
    """Cancellations of the ids `m-<tag>`; tags are counted from `first`."""
    return [
        FakeDelivery(
            Message(
                body=json.dumps({"cancel": f"m-{tag}", **said}).encode(),
                type="cancel",
                routing_key="cancel",
                reply_to=ASKER,
                user_id=user,
            ),
            bench.log,
            tag=tag,
        )
        for tag, user in enumerate(users, start=first)
    ]


async def read(bench: Bench, deliveries: list[FakeDelivery]) -> ControlAnswers:
    session = FakeSession(bench.log, deliveries, ends=True)
    answers = answers_of(bench)
    await control(bench, session, answers=answers, per_tenant_s=PER_S).run()
    return answers


async def test_beyond_its_share_a_tenant_is_refused_and_other_tenants_are_not() -> None:
    bench = Bench()
    await read(bench, cancellations(bench, *["flood"] * (BURST + 2), "shop"))

    told = [each.message for each in bench.publisher.sent]
    refused = [each for each in told if each.headers[n.CONTROL] == "error"]
    assert (len(refused), len(told)) == (2, BURST + 3)
    document = json.loads(refused[0].body)
    assert (document["code"], document["status"], document["retryable"]) == ("too_many_control_messages", 429, True)
    assert await bench.store.find(Identity("shop", f"m-{BURST + 3}")) is not None
    assert await bench.store.find(Identity("flood", f"m-{BURST + 2}")) is None


async def test_in_a_flood_as_many_messages_are_refused_as_carried_out_and_the_rest_is_only_counted() -> None:
    bench = Bench()
    answers = await read(bench, cancellations(bench, *["flood"] * FLOOD, "shop"))

    codes = Counter(each.message.headers[n.CONTROL] for each in bench.publisher.sent)
    assert codes["accepted"] == BURST + 1, "the other tenant's is answered behind the flood"
    assert codes["error"] == BURST
    assert (answers.refused, answers.unanswered) == (FLOOD - BURST, FLOOD - 2 * BURST)
    assert bench.log.count("ack") == FLOOD + 1


async def test_beyond_a_tenants_share_no_body_is_read_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(messages, "_json_object", lambda message: parsed.append(message.user_id))
    bench = Bench()
    await read(bench, cancellations(bench, *["flood"] * FLOOD))

    assert len(parsed) <= 3 * BURST  # once to carry it out, once to name the request in a refusal


async def test_a_speaker_has_a_separate_share_for_each_tenant_it_names() -> None:
    bench = Bench()
    floods = cancellations(bench, *["gateway"] * 3 * BURST, tenant="flood")
    last = 3 * BURST + 1
    await read(bench, [*floods, *cancellations(bench, "gateway", first=last, tenant="shop")])

    assert await bench.store.find(Identity("shop", f"m-{last}")) is not None
    assert await bench.store.find(Identity("flood", f"m-{last - 1}")) is None


def test_without_that_right_requests_wait_for_less_than_a_second_after_the_last_cancellation() -> None:
    async def ready(queues: list[str]) -> dict[str, int]:
        raise AccessRefused("no right to look")

    async def story() -> list[bool]:
        bench = Bench()
        reader = control(bench, FakeSession(bench.log, []), ready=ready, per_tenant_s=PER_S)
        running, found = asyncio.create_task(reader.run()), []
        for pause_s in (0.4, 0.4):
            await asyncio.sleep(pause_s)
            found.append(reader.behind is None)
        await reader.stop()
        await running
        return found

    assert virtually(story()) == [False, True]
