"""Prompts, and quotes of them in a provider's errors, reach only the requester and the dead letter.

Not the log at its most talkative, not a span, an event, the health endpoints or a status.
"""

import asyncio
import json
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from tests.support.brokers import Vhost
from tests.support.corpus.answers import Asked, Piece, head
from tests.support.malicious_provider import MaliciousProvider
from tests.support.otlp import OtlpReceiver
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.waiting import until

CANARY = "cassowary"
"""Text in everything that a requester writes, which the provider quotes."""


def quoting(asked: Asked) -> Iterable[Piece]:
    """An error that quotes the prompt, with the status that the prompt names."""
    prompt = json.loads(asked.body)["messages"][0]["content"]
    status = int(prompt.split()[1])
    kind = {400: "invalid_request_error", 529: "overloaded_error", 500: "api_error"}.get(status, CANARY + " is no type")
    body = json.dumps({"type": "error", "error": {"type": kind, "message": f"you said: {prompt}"}}).encode()
    return [head(status, body=body, request_id="req_1")]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


async def test_prompts_and_quotes_of_them_reach_only_the_requester_and_the_dead_letter(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with MaliciousProvider(quoting) as provider, OtlpReceiver() as otlp, requester(vhost.amqp_url) as app:
        environ = environment(
            vhost.amqp_url,
            vhost.management_url,
            ANTHROPIC_BASE_URL=provider.base_url,
            LANEKEEPER_LOG_LEVEL="debug",
            LANEKEEPER_LANES__CRITICAL__MAX_ATTEMPTS="2",
            OTEL_EXPORTER_OTLP_ENDPOINT=otlp.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="50",
        )
        async with lanekeeper("serve", "--port", "0", environ=environ, folder=tmp_path) as worker:
            health = await worker.ready()
            await app.read_dead()
            await app.read_events()
            asked = [
                await app.publish({"prompt": f"{CANARY} {status} one"}, message_id=f"m-{status}")
                for status in (400, 418, 500, 529)
            ]
            odd = [
                await app.publish(b'{"' + CANARY.encode() + b'": 1, "' + CANARY.encode() + b'": 2}', message_id="m-1"),
                await app.publish({"prompt": "x", "max_tokens": CANARY}, message_id="m-2"),
                await app.publish({"prompt": "x"}, message_id="m-3", headers={f"x-lane-{CANARY}": CANARY}),
                await app.publish({"prompt": "x"}, message_id="m-4", headers={"x-lane-deadline-ms": CANARY}),
                await app.publish({"prompt": "x", "model": CANARY}, message_id="m-5", content_type=CANARY),
            ]
            replies = [await app.final(each) for each in (*asked, *odd)]
            dead = [await app.buried(f"m-{status}") for status in (400, 418, 500, 529)]
            status = await app.control({}, key="status")
            looked = [await asyncio.to_thread(get, f"{health}/{path}") for path in ("healthz", "readyz")]
            await until(lambda: len(app.events) >= 20)
        await until(lambda: otlp.requests)

        assert all(CANARY in reply.json["detail"] for reply in replies[:4]), "the requester is told"
        assert all(CANARY in str(each.headers["x-lane-dead-detail"]) for each in dead)
        assert CANARY in str(dead[-1].headers["x-lane-errors"])
        told = [each for each in worker.events if each["event"] == "request.buried"]
        assert len(told) == 9
        of_requests = [each for each in worker.events if each["event"].startswith("request.")]
        assert [each for each in of_requests if not {"request", "lane", "attempt", "trace_id"} <= each.keys()] == []
        assert {"invalid_request_error 400 (req_1)"} <= {each["reason"] for each in told}
        signals = {
            "log": [json.dumps(each) for each in worker.events] + worker.lines,
            "events": [each.body.decode() + each.routing_key for each in app.events],
            "health": looked,
            "status": [status.body.decode()],
            "spans": [body.decode("latin-1") for _, body in otlp.requests],
        }
        assert {where: [each for each in texts if CANARY in each] for where, texts in signals.items()} == {
            where: [] for where in signals
        }
