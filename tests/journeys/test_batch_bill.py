"""The bill of the provider, which keeps its own ledger, is what Lanekeeper tells of costs and savings."""

from typing import Any

import pytest

from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from service.status import collect_status
from service.worker.figures import sources
from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

HAIKU, SONNET = "claude-haiku-5-5", "claude-sonnet-5-5"
LANE: dict[str, Any] = {"slots": 64, "batches": {"enabled": True, "window_s": 0.5, "first_poll_s": 0.1}}
FAULTS = {3: "[[fault: expired x1]]", 7: "[[fault: overloaded x1]]", 11: "[[fault: invalid]]"}
"""Run live; answered in another batch; refused, for nothing."""


async def test_the_providers_ledger_equals_what_is_told_of_lanes_and_tenants(vhost: Vhost) -> None:
    options = SimulatedOptions(batches=BatchOptions(processing_s=0.3))
    async with (
        serving(vhost, lanes={"batch": LANE}, simulated=options, speakers=(vhost.user,)) as worker,
        requester(vhost) as app,
    ):

        async def ask(lane: str, number: int, **more: Any) -> str:
            prompt = f"number {number} {FAULTS.get(number, '') if lane == 'batch' else ''} [[tokens: {50 + number}]]"
            return await app.publish(
                {"prompt": prompt, "model": SONNET if number % 3 else HAIKU},
                key=f"{lane}.tests.bill",
                message_id=f"{lane}-{number}",
                user_id=vhost.user,
                headers={"x-lane-tenant": "ann" if number % 2 else "bob"},
                **more,
            )

        asked = [await ask("batch", number) for number in range(40)]
        asked += [await ask("critical", number) for number in range(5)]
        statuses = [(await app.final(each)).status for each in asked]

        assert statuses.count("ok") == 44
        ledger, parts = worker.api.ledger, worker.parts
        assert ledger.answers == {"live": 6, "batch": 38}
        totals = parts.budgeting.spending.totals()
        for told in totals.values():
            assert sum(each.usd for each in told.values()) == pytest.approx(float(ledger.usd), abs=1e-9)
            assert sum(each.saved_usd for each in told.values()) == pytest.approx(float(ledger.saved_usd), abs=1e-9)
            assert sum(each.requests for each in told.values()) == 44
        assert ledger.saved_usd == ledger.batch_usd > 0
        assert totals["lane"]["critical"].saved_usd == 0
        assert totals["tenant"]["ann"].saved_usd > 0 < totals["tenant"]["bob"].saved_usd

        status = await collect_status(parts.broker.publishing, lanes=parts.lanes, names=parts.broker.names)
        saved_usd = status.spent["lane"]["batch"]["saved_usd"]
        assert saved_usd == pytest.approx(float(ledger.saved_usd))
        figures = {
            (name, *labels.values()): value
            for source in sources(parts, tenants={"ann"}, store_url="")
            for name, labels, value in source()
            if name.endswith(".saved_usd")
        }
        assert figures == {
            ("lanekeeper.lane.saved_usd", "batch"): pytest.approx(saved_usd),
            ("lanekeeper.lane.saved_usd", "critical"): 0,
            ("lanekeeper.tenant.saved_usd", "ann"): pytest.approx(totals["tenant"]["ann"].saved_usd),
        }


async def test_an_answer_that_comes_too_late_counts_for_its_lane_as_the_provider_bills_it(vhost: Vhost) -> None:
    """The hurried request leaves its batch, and is paid twice: live, and in the batch."""
    lane = {**LANE, "batches": {**LANE["batches"], "count": 2, "window_s": 30, "least_s": 60.0, "promote_s": 55.0}}
    options = SimulatedOptions(batches=BatchOptions(processing_s=3600))
    async with serving(vhost, lanes={"batch": lane}, simulated=options) as worker, requester(vhost) as app:
        patient = await app.publish({"prompt": "no hurry"}, key="batch.tests.bill")
        deadline = {"x-lane-deadline-ms": 62_000}
        hurried = await app.publish({"prompt": "soon"}, key="batch.tests.bill", headers=deadline)
        assert (await app.final(hurried)).status == "ok"
        (batch,) = worker.api.batches.all.values()
        batch.ends_s = 0
        for item in batch.items:
            item.done_s = 0
        assert (await app.final(patient)).status == "ok"

        ledger, spending = worker.api.ledger, worker.parts.budgeting.spending
        assert ledger.answers == {"live": 1, "batch": 2}
        billed_usd = pytest.approx(float(ledger.usd), abs=1e-9)
        await until(lambda: spending.totals()["lane"]["batch"].usd == billed_usd)
        assert spending.totals()["lane"]["batch"].requests == 2
