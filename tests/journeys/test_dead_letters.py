"""Dead letters are grouped by cause, mended, and run again, each once, whenever the tool dies. They have a limit: the
oldest beyond it are removed with a warning, and written to a file if a folder is set."""

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from pydantic import SecretStr

from consumers.clock import now_ms
from consumers.state.base import Identity
from lanekeeper.amqp.connection import Connection
from lanekeeper.telemetry import signals
from service.config.settings import Settings
from service.deadletters import DeadLetters, Filter, LetterEdit
from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.requester import Requester, requester
from tests.support.serving import serving
from tests.support.waiting import until
from topology.broker.deadletters import Scan

NEWEST: dict[str, Any] = {"anthropic_version": "2026-10-21"}  # in which `temperature` is an error
COOLER = LetterEdit(patch={"temperature": None})
RATE = 20.0
USER = "lanekeeper"
"""The user of the tests' virtual hosts."""


def request(number: int, text: str = "", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"number {number}. {text}"}], **more}


@asynccontextmanager
async def operator(vhost: Vhost) -> AsyncIterator[DeadLetters]:
    async with Connection(vhost.amqp_url, name="operator") as connection:
        yield DeadLetters(Settings(amqp_url=SecretStr(vhost.amqp_url)), connection)


async def groups(letters: DeadLetters) -> dict[str, dict[str, Any]]:
    found = (await letters.overview(Filter())).as_json(jaeger_url=None)
    return {group["cause"]: group for group in found["groups"]}


async def ask_all(app: Requester, bodies: dict[str, Any]) -> dict[str, str]:
    """The correlation ids by request ids, when all have ended."""
    asked = {id: await app.publish(body, message_id=id, key="normal.shop.ask") for id, body in bodies.items()}
    for correlation_id in asked.values():
        await app.final(correlation_id)
    await until(lambda: app.holds(len(bodies), "lane.dead"))
    return asked


async def test_100_dead_letters_of_three_causes_are_mended_and_run_again_once(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = {f"hot-{n}": request(n, "[[fault: invalid]]" if n == 7 else "", temperature=0.5) for n in range(40)}
    wrong = {f"wrong-{n}": request(n, max_tokens="many") for n in range(40)}
    unknown = {f"unknown-{n}": {"prompt": f"number {n}", f"field_{n}": n} for n in range(20)}
    async with serving(vhost, **NEWEST) as worker, requester(vhost) as app, operator(vhost) as letters:
        asked = await ask_all(app, {**hot, **wrong, **unknown})
        found = await groups(letters)
        assert sorted((group["code"], group["count"]) for group in found.values()) == [
            ("invalid_request", 20),
            ("invalid_request", 40),
            ("provider_rejected", 40),
        ]
        (cause,) = [cause for cause, group in found.items() if group["code"] == "provider_rejected"]
        mended = Filter(causes=frozenset({cause}))
        called = len(worker.api.calls)

        refused = await letters.replay(mended, LetterEdit(patch={"max_tokens": "few"}))
        assert (refused.refusals, refused.replayed) == (40, 0)
        assert "max_tokens" in refused.refused[0]["reason"]
        dry = await letters.replay(mended, COOLER, dry_run=True)
        assert (dry.matched, dry.replayed, dry.refusals) == (40, 0, 0)
        assert len(worker.api.calls) == called, "nothing was sent"

        began_s = asyncio.get_running_loop().time()
        with pytest.raises(asyncio.CancelledError):
            await killed_after(letters, mended, 10, "remove", monkeypatch)
        with pytest.raises(asyncio.CancelledError):
            await killed_after(letters, mended, 10, "publish", monkeypatch)
        await until(lambda: app.holds(100 - 20 + 1, "lane.dead"))
        done = await letters.replay(mended, COOLER, rate_per_s=RATE)
        took_s = asyncio.get_running_loop().time() - began_s
        assert (done.left, done.refusals) == (0, 0)
        assert took_s > 35 / RATE, "no faster than the rate"

        for id in hot:
            await until(lambda id=id: len(app.finals(asked[id])) > 1)
            first, *others = app.finals(asked[id])
            assert first.status == "error"
            assert {each.status for each in others} == {"error" if id == "hot-7" else "ok"}
            assert len({each.body for each in others}) == 1, "if it came twice, it is the same answer"
        again = list(worker.api.calls)[called:]
        assert len(again) == 40, "each was called once"

        async def relapsed() -> list[dict[str, Any]]:
            overview = (await letters.overview(Filter(ids=frozenset({"hot-7"})))).as_json(jaeger_url=None)
            return [each for each in overview["letters"] if each["replays"]]

        (relapse,) = await until(relapsed)
        assert (relapse["id"], relapse["replays"]) == ("hot-7", 1)
        assert relapse["replayed_at"] < relapse["at"]
        assert sum(group["relapses"] for group in (await groups(letters)).values()) == 1
        assert await letters.drop(Filter(codes=frozenset({"invalid_request"}))) == 60
        assert (await letters.overview(Filter())).total == 1


async def killed_after(
    letters: DeadLetters, wanted: Filter, count: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay, and die at the `count`th letter: before it is published, or between its confirm and its removal."""
    owner: Any = letters._publisher if place == "publish" else Scan
    name = "publish_surely" if place == "publish" else "remove"
    original, calls = getattr(owner, name), 0

    async def dies(*args: Any, **how: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > count:
            raise asyncio.CancelledError
        await original(*args, **how)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dies)
        await letters.replay(wanted, COOLER, rate_per_s=RATE)


async def test_a_replay_goes_to_another_lane_and_model_and_keeps_its_trace(vhost: Vhost) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-00"
    async with serving(vhost, **NEWEST) as worker, requester(vhost) as app, operator(vhost) as letters:
        asked = await app.publish(
            request(1, temperature=1),
            message_id="x",
            key="normal.shop.ask.eu",
            headers={"traceparent": trace, "mine": 1, "x-lane-sent-ms": now_ms(), "x-lane-stream": False},
        )
        await app.final(asked)
        await until(lambda: app.holds(1, "lane.dead"))
        letter = await letters.find(Filter(ids=frozenset({"x"})))
        assert letter is not None
        assert (letter.trace_id, letter.app, letter.attempts, letter.tenant) == ("a" * 32, "shop", 1, "")
        change = LetterEdit(patch={"temperature": None}, to_lane="batch", model="claude-haiku-4-5")
        assert letters.prepared(letter, change).routing_key == "batch.shop.ask.eu"
        assert (await letters.replay(Filter(ids=frozenset({"x"})), change)).replayed == 1
        reply = await until(lambda: app.finals(asked)[1:])
        assert (reply[0].status, reply[0].headers["x-lane-name"]) == ("ok", "batch")
        assert reply[0].headers["traceparent"][3:35] == "a" * 32
        assert worker.api.calls[-1].model == "claude-haiku-4-5"
        batch = next(each for each in worker.parts.activities if each.lane == "batch")
        await until(lambda: batch.snapshot()["answered"])
        assert not batch.recent.since_delivery  # its wait counts from its first delivery on purpose
        assert (await letters.replay(Filter(ids=frozenset({"x"})), change)).matched == 0


async def test_what_cannot_be_read_is_shown_exported_and_dropped(vhost: Vhost) -> None:
    async with serving(vhost, **NEWEST), requester(vhost) as app, operator(vhost) as letters:
        await app.ask(b"\xff\x00 no json", message_id="raw")
        await app.publish(b"foreign", exchange="lane.dead", key="what", reply_to=None, correlation_id=None)
        await until(lambda: app.holds(2, "lane.dead"))
        lines: list[bytes] = []
        assert await letters.export(Filter(), lines.append) == 2
        assert {each["code"] for each in (await groups(letters)).values()} == {"invalid_request", "unknown"}
        refused = await letters.replay(Filter(), LetterEdit())
        assert (refused.refusals, refused.replayed) == (2, 0)
        with_edit = await letters.replay(Filter(ids=frozenset({"raw"})), COOLER)
        assert "no JSON object" in with_edit.refused[0]["reason"]
        assert await letters.drop(Filter()) == 2
        assert await letters.import_(lines) == 2
        await until(lambda: app.holds(2, "lane.dead"))


async def test_a_tenants_dead_letter_is_only_replayed_by_those_who_may_speak_for_it(vhost: Vhost) -> None:
    async with (
        serving(vhost, **NEWEST, speakers=(vhost.user,)) as worker,
        requester(vhost) as app,
        operator(vhost) as mute,
        Connection(vhost.amqp_url, name="speaker") as connection,
    ):
        speaker = DeadLetters(Settings(amqp_url=SecretStr(vhost.amqp_url), speakers=(vhost.user,)), connection)
        headers = {"x-lane-tenant": "crm"}
        await app.ask(request(1, temperature=1), message_id="x", user_id=vhost.user, headers=headers)
        await until(lambda: app.holds(1, "lane.dead"))
        wanted = Filter(tenants=frozenset({"crm"}))
        refused = await mute.replay(wanted, COOLER)
        assert "LANEKEEPER_SPEAKERS" in refused.refused[0]["reason"]
        assert (await speaker.replay(wanted, COOLER)).replayed == 1
        await until(lambda: [call for call in worker.api.calls if call.outcome == "ok"])
        found = await app.control({"result": "x", "tenant": "crm"}, key="result", user_id=vhost.user)
        assert found.status in (None, "ok")


async def test_a_tenant_that_a_requester_only_claims_is_not_in_its_dead_letter(vhost: Vhost) -> None:
    async with serving(vhost, **NEWEST), requester(vhost) as app, operator(vhost) as letters:
        await app.ask(
            request(1, temperature=1), message_id="x", user_id=vhost.user, headers={"x-lane-tenant": "victim"}
        )
        await until(lambda: app.holds(1, "lane.dead"))
        letter = await letters.find(Filter())
        assert letter is not None
        assert letter.tenant == vhost.user


async def test_over_http_only_operators_see_dead_letters_and_only_some_change_them(vhost: Vhost) -> None:
    keys = {hash_of(right): {"tenant": USER, "operator": right} for right in ("no", "look", "act")}
    async with (
        serving(vhost, **NEWEST, jaeger_url=SecretStr("https://j.example")) as worker,
        gate(worker, keys=keys) as url,
        requester(vhost) as app,
        aiohttp.ClientSession() as session,
    ):

        async def call(right: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
            async with session.request(method, f"{url}/v1/dead{path}", headers={"x-api-key": right}, json=body) as got:
                return got.status, await got.json(content_type=None)

        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}
        for number in range(3):
            await app.ask(request(number, temperature=1), message_id=f"m-{number}", headers=trace)
        await until(lambda: app.holds(3, "lane.dead"))
        assert (await call("no", "GET", ""))[0] == 403
        status, found = await call("look", "GET", "?limit=2")
        assert (status, found["matched"], len(found["letters"])) == (200, 3, 2)
        assert found["letters"][0]["trace_url"] == f"https://j.example/trace/{'a' * 32}"
        _, rest = await call("look", "GET", f"?limit=2&after={found['next']}")
        assert [each["id"] for each in (*found["letters"], *rest["letters"])] == ["m-2", "m-1", "m-0"]
        assert (await call("look", "GET", "/m-1"))[1]["message"]["headers"]["x-lane-dead-code"] == "provider_rejected"
        assert (await call("look", "GET", "/none"))[0] == 404
        assert (await call("look", "DELETE", "/m-1"))[0] == 403
        assert (await call("look", "POST", "/replay", {"ids": ["m-0"]}))[0] == 403
        bad: list[Any] = [5, {}, {"id": "m-0"}, {"ids": []}, {"ids": "m-0", "rate": 0}, {"ids": "m-0", "edit": 5}]
        for wrong in bad:
            assert (await call("act", "POST", "/replay", wrong))[0] == 400, wrong
        assert (await call("look", "POST", "/drop", {"ids": ["m-1"]}))[0] == 403
        assert (await call("act", "POST", "/drop", {}))[0] == 400
        assert (await call("act", "POST", "/drop", {"lane": "normal", "dry_run": True}))[1]["dropped"] == 0
        assert (await call("act", "POST", "/drop", {"ids": ["m-1"]}))[1] == {"matched": 1, "dropped": 1}
        (group,) = found["groups"]
        how = {"cause": group["cause"], "edit": {"temperature": None}}
        status, refused = await call("act", "POST", "/replay", {**how, "edit": {"messages": None}})
        assert (status, refused["refusals"], refused["replayed"]) == (422, 2, 0)
        assert (await call("act", "POST", "/replay", {**how, "dry_run": True}))[1]["matched"] == 2
        done = (await call("act", "POST", "/replay", how))[1]
        assert (done["replayed"], done["left"]) == (2, 0)
        await until(lambda: len([call for call in worker.api.calls if call.outcome == "ok"]) == 2)
        assert (await call("look", "GET", ""))[1]["total"] == 0


@pytest.mark.parametrize("bound", [{"max_count": 2}, {"keep_s": 3600}])
async def test_the_oldest_dead_letters_beyond_the_limit_are_exported_and_the_others_stay(
    vhost: Vhost, tmp_path: Path, bound: dict[str, int]
) -> None:
    folder = tmp_path / "dead"
    async with serving(vhost, **NEWEST, dead={"folder": folder, **bound}) as worker, requester(vhost) as app:
        await app.read_events()
        for number in range(4):
            await app.ask(b"rubbish", message_id=f"m-{number}")
        gone = await worker.parts.dead_letters.look()

        assert gone == (2 if "max_count" in bound else 0)
        await until(lambda: app.holds(4 - gone, "lane.dead"))
        if gone:
            (file,) = folder.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert [json.loads(line)["message_id"] for line in file.read_text().splitlines()] == ["m-0", "m-1"]
            await until(lambda: "removed" in app.events_of("m-0") and "removed" in app.events_of("m-1"))
            assert (worker.parts.dead_letters.exported, worker.parts.dead_letters.dropped) == (2, 0)
            assert await worker.parts.dead_letters.look() == 0


async def test_dead_letters_that_are_too_old_are_dropped_with_a_warning_if_there_is_no_folder(vhost: Vhost) -> None:
    async with serving(vhost, **NEWEST, dead={"keep_s": 1}) as worker, requester(vhost) as app:
        await app.read_events()
        for number in range(2):
            await app.ask(b"rubbish", message_id=f"m-{number}")

        async def are_gone() -> bool:
            await worker.parts.dead_letters.look()
            return worker.parts.dead_letters.dropped == 2

        with structlog.testing.capture_logs() as logs:
            await until(are_gone)
        assert sum(each["removed"] for each in logs if each["event"] == signals.DEAD_LETTERS_REMOVED) == 2
        await until(lambda: "removed" in app.events_of("m-0") and "removed" in app.events_of("m-1"))
        await until(lambda: app.holds(0, "lane.dead"))


async def test_several_workers_remove_each_dead_letter_once(vhost: Vhost, tmp_path: Path) -> None:
    """One after the other and at the same time: the broker delivers each dead letter to only one of them."""
    folder, dead = tmp_path / "dead", {"max_count": 2}
    async with (
        serving(vhost, **NEWEST, dead={"folder": folder, **dead}) as one,
        serving(vhost, **NEWEST, dead={"folder": folder, **dead}) as other,
        requester(vhost) as app,
    ):
        for number in range(12):
            await app.ask(b"rubbish", message_id=f"m-{number}")
        both = [each.parts.dead_letters for each in (one, other)]

        async def ten_are_gone_and_two_are_back() -> bool:
            """While a worker looks, it holds the eight oldest; another that looks then sees too few, and ends early."""
            await asyncio.gather(*(each.look() for each in both))
            return sum(each.exported for each in both) >= 10 and await app.depth("lane.dead") == 2

        await until(ten_are_gone_and_two_are_back)
        ids = [json.loads(line)["message_id"] for file in folder.iterdir() for line in file.read_text().splitlines()]
        assert len(ids) == len(set(ids)) == sum(each.exported for each in both) == 10


async def test_a_tenants_invalid_messages_are_all_answered_but_not_all_parked_and_other_tenants_are_not_affected(
    vhost: Vhost,
) -> None:
    async with serving(vhost, **NEWEST, dead={"invalid_per_hour": 3}) as worker, requester(vhost) as app:
        ids = [f"r-{number}" for number in range(6)]
        codes = [(await app.ask(b"rubbish", user_id=vhost.user, message_id=id)).code for id in ids]
        assert codes == ["invalid_request"] * 6
        await until(lambda: app.holds(3, "lane.dead"))
        assert worker.parts.settler.parking.unparked == 3
        kept = [id for id in ids if await worker.parts.store.find(Identity(vhost.user, id)) is not None]
        assert kept == ids[:3], "nor does it fill the store"

        assert (await app.ask(b"rubbish")).code == "invalid_request"
        await until(lambda: app.holds(4, "lane.dead"))  # another tenant has a share of its own
        failed = await app.ask({"prompt": "[[fault: invalid]]"}, user_id=vhost.user)
        assert failed.code == "provider_rejected"
        await until(lambda: app.holds(5, "lane.dead"))  # a valid request that failed is always parked


def letter_of(
    tenant: str, id: str = "d-1", *, at: str = "2026-11-28T13:00:00.000Z", code: str = "attempts_exhausted"
) -> dict[str, Any]:
    """A dead letter as a worker publishes it, for `Requester.publish`."""
    headers = {
        "x-lane-dead-code": code, "x-lane-dead-detail": "x", "x-lane-dead-at": at, "x-lane-attempt": 1,
        "x-lane-routing-key": "normal.shop.ask", **({"x-lane-user-id": tenant} if tenant else {}),
    }  # fmt: skip
    return {"exchange": "lane.dead", "key": "normal.shop.ask", "message_id": id, "headers": headers, "reply_to": None}


async def test_a_dead_letter_that_is_there_twice_is_replayed_once_and_both_are_gone(vhost: Vhost) -> None:
    """Its worker died between publishing it and acknowledging its request."""
    async with serving(vhost, **NEWEST) as worker, requester(vhost) as app, operator(vhost) as letters:
        for _ in range(2):
            await app.publish(request(1), **letter_of(""))
        await until(lambda: app.holds(2, "lane.dead"))
        done = await letters.replay(Filter(ids=frozenset({"d-1"})), LetterEdit())
        assert (done.matched, done.replayed, done.left) == (1, 1, 0)
        await until(lambda: app.holds(0, "lane.dead"))
        await until(lambda: worker.api.calls)
        for _ in range(2):
            await app.publish(request(1), **letter_of(""))
        await until(lambda: app.holds(2, "lane.dead"))
        assert await letters.drop(Filter(ids=frozenset({"d-1"}))) == 2


async def test_another_tenants_letter_of_the_same_id_is_not_touched(vhost: Vhost) -> None:
    keys = {hash_of("act"): {"tenant": USER, "operator": "act"}}
    async with (
        serving(vhost, **NEWEST, speakers=(vhost.user,)) as worker,
        gate(worker, keys=keys) as url,
        requester(vhost) as app,
        aiohttp.ClientSession() as session,
    ):

        async def call(method: str, path: str, body: object = None) -> tuple[int, Any]:
            async with session.request(method, f"{url}/v1/dead{path}", headers={"x-api-key": "act"}, json=body) as got:
                return got.status, await got.json(content_type=None)

        for tenant in ("a", "b", ""):
            await app.publish(request(1, f"of {tenant}"), **letter_of(tenant))
        await until(lambda: app.holds(3, "lane.dead"))
        for method, path, body in (
            ("GET", "/d-1", None), ("DELETE", "/d-1", None), ("POST", "/replay", {"ids": "d-1"}),
        ):  # fmt: skip
            status, told = await call(method, path, body)
            assert (status, "none, 'a', 'b'" in told["detail"] or "name the tenant" in told["detail"]) == (409, True)
        for method, path in (("GET", "?tenants=a"), ("GET", "/d-1?tennant=a"), ("DELETE", "/d-1?tennant=a")):
            status, told = await call(method, path)
            assert (status, "unknown name" in told["detail"]) == (400, True)
        assert (await call("POST", "/replay?tenant=a", {"ids": "d-1"}))[0] == 400
        assert "of a" in (await call("GET", "/d-1?tenant=a"))[1]["message"]["body"]
        assert (await call("DELETE", "/d-1?tenant="))[1] == {"dropped": 1}
        assert (await call("POST", "/replay", {"ids": "d-1", "tenant": "a"}))[1]["replayed"] == 1
        await until(lambda: worker.api.calls)
        _, left = await call("GET", "")
        assert [(each["id"], each["tenant"]) for each in left["letters"]] == [("d-1", "b")]


async def test_a_tenants_dead_letters_do_not_push_out_those_of_another(vhost: Vhost) -> None:
    async with (
        serving(vhost, **NEWEST, dead={"max_count": 16}) as worker,
        requester(vhost) as app,
        operator(vhost) as letters,
    ):
        for number in range(4):
            await app.publish(b"{}", **letter_of("victim", f"v-{number}"))
        for number in range(40):
            await app.publish(b"{}", **letter_of("flood", f"f-{number}"))
        await until(lambda: app.holds(44, "lane.dead"))
        assert await worker.parts.dead_letters.look() == 30
        left = (await letters.overview(Filter(), limit=50)).as_json(jaeger_url=None)["letters"]
        assert {each["id"] for each in left} == {f"v-{number}" for number in range(4)} | {
            f"f-{number}" for number in range(30, 40)
        }
        assert await worker.parts.dead_letters.look() == 0
