"""Pipelines from the requester's side: steps, fan-out and join, partial failure, replays, cancellation."""

import asyncio
import gzip
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from consumers.flows.pipelines import StepSpec
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerUnreachable
from service.config.flows import PipelineSettings
from service.deadletters import DeadLetters, Filter, LetterEdit
from tests.support.brokers import Vhost
from tests.support.gate import call, gate
from tests.support.malicious import Stalls
from tests.support.processes import environment, lanekeeper
from tests.support.redis import redis_server
from tests.support.requester import Requester, requester
from tests.support.serving import HeldCalls, serving
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples/python"
FUNCTIONS = "tests.support.functions"
CHUNK = {"run": f"{FUNCTIONS}:words", "kind": "async"}


def pipeline(*steps: StepSpec) -> PipelineSettings:
    return PipelineSettings.model_validate({"steps": [asdict(step) for step in steps]})


def ingest(**how: Any) -> PipelineSettings:
    """A text is cut into words, a model is asked about each, and about all of them."""
    return pipeline(
        StepSpec(name="chunk", handler="words"),
        StepSpec(name="each_word", each="chunk", prompt="about {{ item }}", lane="batch", **how),
        StepSpec(
            name="combine",
            prompt="{% for one in each_word %}{{ one|tojson }}\n{% endfor %}",
            lane="critical",
            max_tokens=10_000,  # the answer repeats the prompt, and the problem documents in it
        ),
    )


async def run(app: Requester, name: str, given: Any, **how: Any) -> str:
    return await app.publish(given, headers={"x-lane-pipeline": name, **how.pop("headers", {})}, **how)


async def test_steps_run_in_order_each_in_its_lane_and_the_reply_is_the_last_ones(vhost: Vhost) -> None:
    pipelines = {
        "three": pipeline(
            StepSpec(name="first", prompt="one {{ input.word }}"),
            StepSpec(name="second", prompt="two {{ first }}", lane="batch", model="claude-haiku-5-5"),
            StepSpec(name="third", handler="echo", lane="normal"),
        )
    }
    handlers = {"echo": {"run": f"{FUNCTIONS}:echo"}}
    async with serving(vhost.amqp_url, pipelines=pipelines, handlers=handlers) as worker:
        async with requester(vhost.amqp_url) as app:
            reply = await app.final(await run(app, "three", {"word": "river"}, message_id="p-1"))
            assert reply.status == "ok", reply.json
            assert reply.json == {"echo": "echo: two echo: one river"}
            assert reply.headers["x-lane-name"] == "normal"
            assert reply.headers["x-lane-provider"] == "handler"
            assert reply.headers["x-lane-request-id"] == "p-1"
            assert [call.prompt for call in worker.api.calls] == ["one river", "two echo: one river"]
            again = await app.final(await run(app, "three", {"word": "river"}, message_id="p-1"))
            assert again.headers["x-lane-replayed"] is True
            assert again.body == reply.body
            other = await app.final(await run(app, "three", {"word": "lake"}, message_id="p-1"))
            assert other.code == "idempotency_conflict"
        assert len(worker.api.calls) == 2


async def test_a_fan_out_is_joined_in_order(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, pipelines={"ingest": ingest()}, handlers={"words": CHUNK}) as worker:
        async with requester(vhost.amqp_url) as app:
            words = [f"w{n}" for n in range(100)]
            reply = await app.final(await run(app, "ingest", " ".join(words), message_id="doc-1"), within_s=60)
            assert reply.status == "ok", reply.json
            assert reply.text == "echo: " + "".join(f'"echo: about {word}"\n' for word in words)
            assert reply.headers["x-lane-name"] == "critical"
        assert len(worker.api.calls) == 101


@pytest.mark.parametrize("policy", ["fail", "skip", "keep"])
async def test_a_fan_out_of_a_hundred_with_three_failures(vhost: Vhost, policy: str) -> None:
    pipelines = {"ingest": ingest(on_failure=policy)}
    words = [f"w{n}" if n not in (7, 50, 99) else f"bad{n}[[fault:nope]]" for n in range(100)]
    async with serving(vhost.amqp_url, pipelines=pipelines, handlers={"words": CHUNK}) as worker:
        async with requester(vhost.amqp_url) as app:
            await app.read_dead()
            reply = await app.final(await run(app, "ingest", " ".join(words), message_id="doc-1"), within_s=60)
            if policy == "fail":
                assert reply.code == "provider_rejected"
                assert reply.json["detail"].startswith("step each_word: item ")
                letter = await app.buried("doc-1")
                assert letter.json == " ".join(words)
                assert letter.headers["x-lane-pipeline"] == "ingest"
                assert letter.headers["x-lane-routing-key"] == "critical.tests.ask"
            else:
                assert reply.status == "ok", reply.json
                good = [f'"echo: about {word}"' for word in words if "bad" not in word]
                found = reply.text.removeprefix("echo: ").split("\n")[:-1]
                assert [each for each in found if "about w" in each] == good
                assert len(found) == (97 if policy == "skip" else 100)
                if policy == "keep":
                    assert "provider_rejected" in found[7]
                assert not app.dead
        assert not [call for call in worker.api.calls if call.prompt.count("[[fault:nope]]") > 1]


async def test_a_pipeline_whose_middle_step_fails_is_retried_there_and_a_replay_goes_on_at_it(vhost: Vhost) -> None:
    pipelines = {
        "p": pipeline(
            StepSpec(name="first", prompt="first {{ input }}"),
            StepSpec(name="middle", handler="fails"),
            StepSpec(name="last", prompt="last {{ middle }}"),
        )
    }
    lanes = {"critical": {"max_attempts": 3}}
    handlers = {"fails": {"run": f"{FUNCTIONS}:fails"}}
    async with requester(vhost.amqp_url) as app:
        async with serving(vhost.amqp_url, lanes=lanes, pipelines=pipelines, handlers=handlers) as worker:
            await app.read_dead()
            reply = await app.final(await run(app, "p", "x", message_id="p-1"))
            assert reply.code == "attempts_exhausted"
            assert reply.json["attempts"] == 3
            assert reply.json["detail"].startswith("step middle: all 3 attempts failed")
            assert [call.prompt for call in worker.api.calls] == ["first x"]
            letter = await app.buried("p-1")
            assert letter.json == "x"
        handlers = {"fails": {"run": f"{FUNCTIONS}:echo"}}
        async with serving(vhost.amqp_url, lanes=lanes, pipelines=pipelines, handlers=handlers) as worker:
            replayed = await app.publish(
                letter.body,
                key=letter.headers["x-lane-routing-key"],
                headers={k: v for k, v in letter.headers.items() if k.startswith("x-lane-") and k != "x-lane-sent-ms"},
                message_id="p-1",
            )
            assert (await app.final(replayed)).text == 'echo: last {"echo": "echo: first x"}'
            assert [call.prompt for call in worker.api.calls] == ['last {"echo": "echo: first x"}'], "first is stored"


@pytest.mark.parametrize("side_queues", [1, 0])
async def test_a_replayed_fan_out_asks_only_for_the_items_that_failed_unless_it_was_edited(
    vhost: Vhost, side_queues: int
) -> None:
    lanes = {"batch": {"max_attempts": 1, "slots": 2, "side_queues": side_queues}}
    words = [f"w{n}" for n in range(8)] + ["bad [[fault: overloaded x1]]"] + [f"w{n}" for n in range(8, 20)]
    ours = serving(vhost.amqp_url, lanes=lanes, pipelines={"ingest": ingest()}, handlers={"words": CHUNK})
    async with ours as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        failed = await app.final(await run(app, "ingest", "\n".join(words), message_id="doc-1"))
        assert failed.code == "attempts_exhausted"
        assert "item 9: " in failed.json["detail"]
        letter = await app.buried("doc-1")

        async def replayed(body: bytes) -> str:
            headers = {name: value for name, value in letter.headers.items() if name.startswith("x-lane-")}
            return await app.publish(body, key=headers["x-lane-routing-key"], headers=headers, message_id="doc-1")

        reply = await app.final(await replayed(letter.body))
        assert reply.status == "ok", reply.json
        found = [each for each in reply.text.removeprefix("echo: ").split("\n") if each]
        assert found == [f'"echo: about {word}"' for word in words]
        items = Counter(call.prompt for call in worker.calls("about") if '"' not in call.prompt)
        assert items == {f"about {word}": 2 if "bad" in word else 1 for word in words}

        second = await run(app, "ingest", "\n".join([*words, "bad2 [[fault: overloaded x1]]"]), message_id="doc-2")
        assert (await app.final(second)).status == "error"
        letter = await app.buried("doc-2")
        headers = {name: value for name, value in letter.headers.items() if name.startswith("x-lane-")}
        edited = await app.publish("a\nb", key="critical.tests.ask", headers=headers, message_id="doc-2")
        assert (await app.final(edited)).text == 'echo: "echo: about a"\n"echo: about b"\n'


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_pipeline_that_is_cancelled_or_fails_stops_its_items_also_those_that_run(
    vhost: Vhost, how: str
) -> None:
    pipelines = {"ingest": ingest()}
    lanes = {"batch": {"slots": 3}}
    words = " ".join(["[[fault:nope]]" if how == "failed" else "[[held]]", *(f"w{n}[[held]]" for n in range(20))])
    ours = serving(vhost.amqp_url, lanes=lanes, pipelines=pipelines, handlers={"words": CHUNK})
    async with ours as worker, requester(vhost.amqp_url) as app:
        asked = await run(app, "ingest", words, message_id="doc-1")
        if how == "cancelled":
            await until(lambda: worker.api.running == 3)
            await app.control({"cancel": "doc-1"}, key="cancel")
        assert (await app.final(asked)).code == ("cancelled" if how == "cancelled" else "provider_rejected")
        batch = next(each for each in worker.parts.activities if each.lane == "batch")
        await until(lambda: batch.failed >= 18 and worker.api.running == 0, within_s=30)
        assert len(worker.api.calls) <= 4, "no other began"


async def test_bad_input_of_a_pipeline_is_a_typed_problem(vhost: Vhost) -> None:
    pipelines = {
        "list": pipeline(StepSpec(name="all", each="input.pages", prompt="{{ item }}")),
        "grows": pipeline(StepSpec(name="all", prompt="{% for a in input %}" + 10 * "{{ a }}" + "{% endfor %}")),
        "deep": pipeline(StepSpec(name="first", handler="echo"), StepSpec(name="second", handler="echo")),
        "large": pipeline(StepSpec(name="first", handler="is_large"), StepSpec(name="second", handler="echo")),
    }
    handlers = {"echo": {"run": f"{FUNCTIONS}:echo"}, "is_large": {"run": f"{FUNCTIONS}:is_large", "kind": "cpu"}}
    ours = serving(vhost.amqp_url, pipelines=pipelines, handlers=handlers)
    async with ours as worker, requester(vhost.amqp_url) as app:
        unknown = await app.final(await run(app, "other", 1))
        assert unknown.code == "invalid_request"
        assert "'other' is no pipeline (declared: deep, grows, large, list)" in unknown.json["detail"]
        missing = await app.final(await run(app, "list", {"p": 1}))
        assert missing.code == "invalid_request"
        assert missing.json["detail"].startswith("step all: its template does not fit the input")
        no_list = await app.final(await run(app, "list", {"pages": "abc"}))
        assert "allowed is a list" in no_list.json["detail"]
        too_many = await app.final(await run(app, "list", {"pages": [0] * 50_000}))
        assert too_many.code == "too_large"
        empty = await app.final(await run(app, "list", {"pages": []}))
        assert (empty.status, empty.json) == ("ok", [])
        grows = await app.final(await run(app, "grows", ["x" * 100] * 2000))
        assert grows.code == "too_large"
        deep = await app.final(await run(app, "deep", b"[" * 200 + b"]" * 200))
        assert deep.code == "invalid_request"
        assert deep.json["detail"].startswith("step second: its input or an output is nested too deeply")
        large = await app.final(await run(app, "large", 8 * 1024 * 1024))
        assert large.code == "too_large"
        assert large.json["detail"].startswith("step first: ")
        streamed = await app.final(await run(app, "grows", 1, headers={"x-lane-stream": True}))
        assert streamed.code == "invalid_request"
        assert not worker.api.calls
        assert worker.is_well


async def test_slow_templates_are_refused_and_hold_up_no_other_request(vhost: Vhost) -> None:
    pipelines = {
        "slow": pipeline(
            StepSpec(name="s", prompt="{% for a in input %}{% for b in input %}{% endfor %}{% endfor %}", lane="normal")
        ),
        "quick": pipeline(StepSpec(name="s", prompt="quick {{ input }}")),
    }
    async with serving(vhost.amqp_url, pipelines=pipelines) as worker, requester(vhost.amqp_url) as app:
        with Stalls() as stalls:
            slow = [await run(app, "slow", list(range(50_000))) for _ in range(5)]
            quick = await app.final(await run(app, "quick", "river"))
            assert quick.text == "echo: quick river"
            assert not any(app.finals(each) for each in slow[2:]), "it did not wait for them"
            for each in slow:
                refused = await app.final(each, within_s=60)
                assert refused.code == "invalid_request"
                assert "takes more than 1 s of CPU time; give it less input" in refused.json["detail"]
        assert len(worker.api.calls) == 1
    assert stalls.longest_s < 0.25


async def test_progress_is_told_by_status_events_and_result(vhost: Vhost, tmp_path: Path) -> None:
    words = " ".join(["w0", "w1", *(f"w{n}[[held]]" for n in range(2, 6))])
    ours = serving(vhost.amqp_url, pipelines={"ingest": ingest()}, handlers={"words": CHUNK})
    async with ours as worker, gate(worker.settings) as url, requester(vhost.amqp_url) as app:
        await app.read_events()
        headers = {"x-lane-pipeline": "ingest", "content-type": "application/json"}
        posted = await call("POST", f"{url}/v1/requests", f'"{words}"'.encode(), **headers)
        assert posted.status == 202, posted.body

        async def step() -> Any:
            return (await call("GET", url + posted["status_url"])).body.get("step")

        while await step() != "each_word, 2 of 6":  # noqa: ASYNC110  an application polls
            await asyncio.sleep(0.05)
        pending = await app.control({"result": posted["id"]}, key="result")
        assert pending.json["step"] == "each_word, 2 of 6"
        async with lanekeeper("result", posted["id"], environ=environment(vhost), folder=tmp_path) as fetched:
            assert await fetched.ended() == 1
        assert "step: each_word, 2 of 6" in fetched.events[-1]["event"]
        worker.api.release()
        found = await call("GET", f"{url}{posted['status_url']}?wait=30s")
        assert found["status"] == "completed"
        assert "step" not in found.body

        def told() -> list[Any]:
            return [each.json for each in app.events if each.json["event"] == "step"]

        await until(lambda: {"each_word", "combine"} <= {each["next"] for each in told()})
        assert any((each.get("done"), each.get("of")) == (2, 6) for each in told())


@pytest.mark.parametrize("is_large", [False, True])
async def test_items_that_the_store_has_lost_are_asked_again(
    vhost: Vhost, tmp_path: Path, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large state is in the store too, and in a message that goes round seldom."""
    monkeypatch.setattr("consumers.flows.pipelines.KEEPER_MS", 800)
    if is_large:
        monkeypatch.setattr("consumers.flows.pipelines.SPLIT_BYTES", 1)
    words = " ".join(["w0", "w1", *(f"w{n}[[held]]" for n in range(2, 6))])
    with redis_server(tmp_path) as redis:
        ours = serving(
            vhost.amqp_url,
            pipelines={"ingest": ingest()},
            handlers={"words": CHUNK},
            store_url=SecretStr(redis.url),
        )
        async with ours as worker, requester(vhost.amqp_url) as app:
            asked = await run(app, "ingest", words, message_id="doc-1")
            await until(lambda: worker.api.running == 4)

            async def is_told() -> bool:
                told = (await app.control({"result": "doc-1"}, key="result")).json
                return bool(told.get("step") == "each_word, 2 of 6")

            while not await is_told():  # noqa: ASYNC110  an application polls
                await asyncio.sleep(0.05)
            redis.kill()
            redis.start()
            worker.api.release()
            reply = await app.final(asked, within_s=60)
            assert reply.status == "ok", reply.json
            found = [each for each in reply.text.removeprefix("echo: ").split("\n") if each]
            assert found == [f'"echo: about {word}"' for word in words.split()]


async def test_a_waiting_fan_out_does_not_publish_its_state_again_and_again(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its request fails: it is kept as it was published."""
    large = "w" * 200_000
    words = " ".join(["w0[[held]]", "[[fault:nope]]", large])
    published, publish = Counter[str](), Publisher.publish_surely

    async def counted(publisher: Publisher, message: Message, **how: Any) -> None:
        published[message.message_id or ""] += len(message.body)
        await publish(publisher, message, **how)

    monkeypatch.setattr(Publisher, "publish_surely", counted)
    lanes = {"batch": {"slots": 1}}
    ours = serving(vhost.amqp_url, lanes=lanes, pipelines={"ingest": ingest()}, handlers={"words": CHUNK})
    async with ours as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        asked = await run(app, "ingest", words, message_id="doc-1")
        await until(lambda: worker.api.running == 1)
        await asyncio.sleep(3)  # while it looks
        worker.api.release()
        reply = await app.final(asked)
        assert reply.code == "provider_rejected"
        assert (await app.buried("doc-1")).json == words
    assert published["doc-1"] < 6 * len(large), "input and list twice: between steps, and to be kept; and the letter"


async def test_the_example_ingests_a_document(vhost: Vhost) -> None:
    async with HeldCalls() as api:
        ours = ("serve", "--config", "documents/lanekeeper.toml")
        environ = environment(vhost, api)
        async with lanekeeper(*ours, environ=environ, folder=EXAMPLES) as worker, requester(vhost.amqp_url) as app:
            await worker.ready()
            document = {"text": "one river\n\ntwo lakes\n\nthree seas", "characters": 12}
            reply = await app.final(await run(app, "ingest", document))
            assert [word in reply.text for word in ("one river", "two lakes", "three seas")] == [True] * 3
            assert len(api.calls) == 4
            embedded = await app.ask({"text": "one river"}, message_type="embed")
            assert len(embedded.json["embedding"]) == 16
            wrong = await app.ask({"text": 1}, message_type="embed")
            assert wrong.code == "provider_rejected"


async def test_items_that_the_broker_did_not_get_are_published_by_the_next_delivery(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(vhost.amqp_url, pipelines={"ingest": ingest()}, handlers={"words": CHUNK}) as worker:
        publisher, cut = worker.parts.broker.publisher, list[str]()
        publish = publisher.publish_surely

        async def publish_surely(message: Message, **how: Any) -> None:
            if (message.message_id or "").endswith((".2", ".3")) and len(cut) < 2:
                cut.append(message.message_id or "")
                raise BrokerUnreachable("the connection is lost")
            await publish(message, **how)

        monkeypatch.setattr(publisher, "publish_surely", publish_surely)
        async with requester(vhost.amqp_url) as app:
            reply = await app.final(await run(app, "ingest", "a b c d", message_id="doc-1"), within_s=30)
            assert reply.text == "echo: " + "".join(f'"echo: about {word}"\n' for word in "abcd")
            assert [id[-2:] for id in cut] == [".2", ".3"]
        assert len(worker.api.calls) == 5


async def test_an_items_answer_that_is_large_is_not_kept_elsewhere(vhost: Vhost, tmp_path: Path) -> None:
    pipelines = {"p": pipeline(StepSpec(name="each_one", each="input", handler="echo"))}
    settings: dict[str, Any] = {"handlers": {"echo": {"run": f"{FUNCTIONS}:echo"}}, "pipelines": pipelines}
    settings["bodies"] = {"url": f"file://{tmp_path}/bodies", "answers_over_bytes": 20_000}
    async with serving(vhost.amqp_url, **settings), requester(vhost.amqp_url) as app:
        reply = await app.final(await run(app, "p", ["x" * 30_000, "y"]), within_s=30)
        address = reply.json["address"]
        kept = await asyncio.to_thread(Path(address.removeprefix("file://")).read_bytes)
        assert json.loads(kept)[0] == {"echo": "x" * 30_000}


async def test_dead_letters_of_pipelines_and_handlers_are_replayed_by_the_operator(vhost: Vhost) -> None:
    settings: dict[str, Any] = {
        "pipelines": {"p": pipeline(StepSpec(name="first", prompt="{{ input }}"), StepSpec(name="next", handler="it"))},
        "lanes": {"critical": {"max_attempts": 1}},
    }
    async with requester(vhost.amqp_url) as app:
        async with serving(vhost.amqp_url, handlers={"it": {"run": f"{FUNCTIONS}:fails"}}, **settings):
            packed = gzip.compress(b'"x"')
            stepped = await run(app, "p", packed, message_id="p-1", content_encoding="gzip")
            await app.final(stepped)
            ended = await app.publish("y", message_type="it", message_id="h-1")
            await app.final(ended)
        async with serving(vhost.amqp_url, handlers={"it": {"run": f"{FUNCTIONS}:echo"}}, **settings) as worker:
            async with Connection(vhost.amqp_url, name="operator") as connection:
                letters = DeadLetters(worker.settings, connection)
                other = await letters.replay(Filter(), LetterEdit(model="claude-haiku-5-5"))
                assert (other.refusals, other.replayed) == (2, 0)
                done = await letters.replay(Filter(), LetterEdit())
                assert (done.refusals, done.replayed) == (0, 2), done.refused
            await until(lambda: len(app.finals(stepped)) + len(app.finals(ended)) == 4)
            assert app.finals(stepped)[1].json == {"echo": "echo: x"}
            assert app.finals(ended)[1].json == {"echo": "y"}
            assert not worker.api.calls, "the first step is stored"
