"""Anthropic's own SDKs, unmodified, against the gateway and against the API itself: the same answers and errors."""

import asyncio
import json
import re
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, AsyncStream

from consumers.providers.breakers import OVERLOADED_S, REQUESTS
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.serving import serving
from tests.support.waiting import until

TOOL = {
    "name": "look",
    "input_schema": {"type": "object", "required": ["at"], "properties": {"at": {"type": "string"}}},
}
BODIES: dict[str, dict[str, Any]] = {
    "text": {},
    "blocks": {"system": [{"type": "text", "text": "Be brief."}], "metadata": {"user_id": "u-1"}},
    "thinking": {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    "tools": {"tools": [TOOL]},
}


def asked(**extra: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": [{"type": "text", "text": "tell me a “story” 🦊"}]}]
    return {"model": "claude-sonnet-5-5", "max_tokens": 100, "messages": said, **extra}


def same(message: Any) -> Any:
    """A Message without what differs from call to call."""
    return {**message.to_dict(), "id": ""}


def sdk(url: str, **options: Any) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key="sk-ant-any", **options)


async def test_messages_are_the_same(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url, sdk(url) as ours, sdk(worker.api.base_url) as own:
        for what, extra in BODIES.items():
            said = asked(**extra)
            assert same(await ours.messages.create(**said)) == same(await own.messages.create(**said)), what


async def test_its_bytes_are_the_providers_and_its_headers_tell_of_the_lane(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url, sdk(url) as ours, sdk(worker.api.base_url) as own:
        through = await ours.messages.with_raw_response.create(**asked(), extra_headers={"x-lane-name": "normal"})
        direct = await own.messages.with_raw_response.create(**asked())

        said, expected = [await each.read() for each in (through, direct)]
        assert said.replace(json.loads(said)["id"].encode(), json.loads(expected)["id"].encode()) == expected
        assert through.headers["x-lane-name"] == "normal"
        assert through.headers["x-lane-attempt"] == "1"
        assert through.headers["request-id"]


async def test_the_events_of_streams_are_the_same(vhost: Vhost) -> None:
    async def events(client: AsyncAnthropic, extra: dict[str, Any]) -> list[Any]:
        async with client.messages.stream(**asked(**extra)) as stream:
            found = [event.to_dict() async for event in stream]
            assert same(await stream.get_final_message())
        return json.loads(json.dumps(found).replace(found[0]["message"]["id"], "")) if found else []

    async with serving(vhost) as worker, gate(worker) as url, sdk(url) as ours, sdk(worker.api.base_url) as own:
        for what, extra in BODIES.items():
            assert await events(ours, extra) == await events(own, extra), what


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "claude-nobody"},
        {"messages": [{"role": "user", "content": "[[fault: invalid]]"}]},
        {"max_tokens": 100, "temperature": 0.5},
        {"messages": [{"role": "user", "content": "[[fault: overloaded]]"}]},
        {"messages": [{"role": "user", "content": "[[fault: rate_limited retry_after=1]]"}]},
    ],
    ids=["model", "fault", "parameter", "overloaded", "rate limit"],
)
async def test_an_error_is_the_same(vhost: Vhost, wrong: dict[str, Any]) -> None:
    async def asks(client: AsyncAnthropic, *, stream: bool) -> None:
        given = {**asked(), **wrong}
        sampling = {"temperature": given.pop("temperature")} if "temperature" in given else None
        found = await client.messages.create(**given, stream=stream, extra_body=sampling)
        if isinstance(found, AsyncStream):
            async for _ in found:
                pass

    async def error(client: AsyncAnthropic, *, stream: bool) -> Any:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await asks(client, stream=stream)
        body = caught.value.body
        assert isinstance(body, dict)
        return type(caught.value), caught.value.status_code, body["error"]["type"], body["error"]["message"]

    async with (
        serving(vhost, lanes={"normal": {"max_attempts": 2}}) as worker,
        gate(worker) as url,
        sdk(url, max_retries=0) as ours,
        sdk(worker.api.base_url, max_retries=0) as own,
    ):
        for stream in (False, True):
            assert await error(ours, stream=stream) == await error(own, stream=stream)


async def test_calls_that_wait_in_the_queue_are_kept_open_and_answered(vhost: Vhost) -> None:
    lines: list[str] = []

    async def read() -> None:
        async with client.messages.with_streaming_response.create(**asked(), stream=True) as raw:
            async for line in raw.iter_lines():
                lines.append(line)

    async def streamed() -> Any:
        async with client.messages.stream(**asked()) as stream:
            return await stream.get_final_message()

    ahead = {**asked(), "messages": [{"role": "user", "content": "[[fault: hang]] ahead"}]}
    async with (
        serving(vhost, lanes={"normal": {"slots": 1}}) as worker,
        gate(worker, ping_every_s=0.05) as url,
        sdk(url, max_retries=0) as client,
    ):
        holding = asyncio.create_task(client.messages.create(**ahead))
        await worker.api.until(lambda: worker.api.running == 1)
        reading = asyncio.create_task(read())
        calls = [asyncio.create_task(each) for each in (client.messages.create(**asked()), streamed())]
        await until(lambda: lines.count("event: ping") >= 5 or reading.done())
        assert not worker.calls("story"), "they wait in the queue"
        assert not any(each.done() for each in calls)
        holding.cancel()  # its connection closes, so its request is cancelled and its slot is free

        assert [same(message)["stop_reason"] for message in await asyncio.gather(*calls)] == ["end_turn"] * 2
        await reading
        assert "event: message_stop" in lines
        assert [each.outcome for each in worker.calls("story")] == ["ok"] * 3


async def test_a_call_may_take_longer_than_an_attempt_of_its_lane_and_is_made_once(vhost: Vhost) -> None:
    lanes = {"normal": {"call_timeout_s": 0.5, "deadline_s": 1}}
    async with serving(vhost, lanes=lanes) as worker, gate(worker) as url, sdk(url) as ours:
        slow = asked(messages=[{"role": "user", "content": "[[latency: 3s]] slow"}])
        found = await ours.messages.with_raw_response.create(**slow)

        assert (await found.parse()).content[0].text == "echo: [[latency: 3s]] slow"
        assert found.headers["x-lane-name"] == "normal"
        assert int(found.headers["x-lane-run-ms"]) >= 3000 > int(found.headers["x-lane-wait-ms"])
        assert len(worker.calls("slow")) == 1


async def test_a_stream_that_flows_is_not_cut_by_the_callers_timeout(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url, sdk(url) as ours:
        slow = asked(messages=[{"role": "user", "content": "[[latency: 6s]] a story in many pieces"}])
        async with ours.messages.stream(**slow, timeout=3) as stream:
            assert "in many pieces" in await stream.get_final_text()

        assert len(worker.calls("many pieces")) == 1


async def test_an_overload_that_has_opened_the_breakers_is_answered_as_itself(vhost: Vhost) -> None:
    async def error() -> anthropic.APIStatusError:
        with pytest.raises(anthropic.InternalServerError) as caught:
            await ours.messages.create(
                **asked(messages=[{"role": "user", "content": "[[fault: overloaded]]"}]),
                extra_headers={"x-lane-deadline-ms": f"{1000 * (OVERLOADED_S + 10):.0f}"},
            )
        return caught.value

    async with (
        serving(vhost, lanes={"normal": {"max_attempts": 100}}) as worker,
        gate(worker) as url,
        sdk(url, max_retries=0) as ours,  # whose own timeout is later, so that the answer at the deadline is read
    ):
        errors = await asyncio.gather(*(error() for _ in range(REQUESTS)))

    assert [each.response.headers["x-lane-code"] for each in errors] == ["provider_unavailable"] * REQUESTS
    assert {(each.status_code, each.type) for each in errors} == {(529, "overloaded_error")}
    assert all("retry-after" in each.response.headers for each in errors)
    assert not any("x-should-retry" in each.response.headers for each in errors)


CALLS = Path(__file__).parents[1] / "support" / "typescript"
_ID = re.compile(r'"(id|request_id|_request_id)": "[^"]*"')


async def finished(*command: str, folder: Path, within_s: float = 120) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(within_s):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        return -1, "", f"not within {within_s:g} s"
    return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture
async def typescript(tmp_path: Path) -> Path:
    """A folder with the SDK in the version of the lock file."""
    folder = tmp_path / "typescript"
    shutil.copytree(CALLS, folder)
    code, _, error = await finished("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=folder)
    if code != 0:
        pytest.skip(f"npm cannot install the SDK: {error.strip()[-200:]}")
    return folder


async def got(typescript: Path, url: str) -> Any:
    """What the SDK got from an API, without what differs from call to call."""
    code, out, error = await finished("node", "calls.js", url, folder=typescript)
    assert code == 0, error
    return json.loads(_ID.sub(r'"\1": ""', json.dumps(json.loads(out))))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None,
    reason="node or npm is not installed (Debian: apt install nodejs npm)",
)
async def test_it_gets_the_same_from_the_gateway_as_from_the_api(vhost: Vhost, typescript: Path) -> None:
    async with serving(vhost) as worker, gate(worker) as url:
        ours, own = await got(typescript, url), await got(typescript, worker.api.base_url)

    for part in own:
        assert ours[part] == own[part], part
    assert {kind["type"] for kind in own["final"]["tools"]["content"]} >= {"tool_use"}
    assert {kind["type"] for kind in own["final"]["thinking"]["content"]} >= {"thinking"}
    assert [each["status"] for each in own["errors"].values()] == [404, 404, 400, 400, 529, 529]
