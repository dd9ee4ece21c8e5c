"""Other AMQP clients: an application with pika. `./dev interop` runs the examples of all languages."""

import asyncio
import json
import threading
from typing import Any

import pika
import pytest

from tests.support.brokers import Vhost
from tests.support.serving import serving

WITHIN_S = 60


def pika_asks(url: str, reply_to: str, requests: list[tuple[str, Any, dict[str, Any]]]) -> dict[str, list[Any]]:
    """Like any application with pika: publish all requests, then collect their final replies."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    replies: dict[str, list[Any]] = {}
    finals = 0

    def keep(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        nonlocal finals
        replies.setdefault(properties.correlation_id, []).append((properties, body))
        finals += "x-lane-status" in properties.headers

    try:
        channel = connection.channel()
        queue = reply_to or channel.queue_declare("", exclusive=True).method.queue
        channel.basic_consume(queue, keep, auto_ack=True)
        if not reply_to:
            channel.confirm_delivery()
        for number, (key, body, headers) in enumerate(requests):
            properties = pika.BasicProperties(
                content_type="application/json",
                reply_to=queue,
                correlation_id=f"c-{number}",
                message_id=f"m-{number}",
                delivery_mode=2,
                headers=headers,
            )
            channel.basic_publish("lane.requests", key, json.dumps(body).encode(), properties, mandatory=not reply_to)
        stop = threading.Timer(WITHIN_S, lambda: connection.add_callback_threadsafe(connection.close))
        stop.start()
        while finals < len(requests):
            connection.process_data_events(time_limit=1)
        stop.cancel()
        return replies
    finally:
        if connection.is_open:
            connection.close()


@pytest.mark.oldest_version
@pytest.mark.parametrize("reply_to", ["", "amq.rabbitmq.reply-to"], ids=["exclusive queue", "direct reply-to"])
async def test_an_application_with_pika_is_answered(vhost: Vhost, reply_to: str) -> None:
    requests: list[tuple[str, Any, dict[str, Any]]] = [
        ("critical.shop.chat", {"prompt": "whole"}, {}),
        ("normal.shop.chat", {"prompt": "in parts"}, {"x-lane-stream": True}),
        ("batch.shop.chat", {"prompt": "again [[fault: overloaded x2]]"}, {"x-lane-deadline-ms": 60_000}),
        ("critical.shop.chat", {"prompt": "later"}, {"x-lane-delay-ms": 300}),
        ("critical.shop.chat", {"prompt": "never [[fault: invalid]]"}, {}),
        ("critical.shop.chat", {"nonsense": 1}, {}),
    ]
    async with serving(vhost):
        replies = await asyncio.to_thread(pika_asks, vhost.amqp_url, reply_to, requests)

    finals = {name: [each for each in got if "x-lane-status" in each[0].headers] for name, got in replies.items()}
    assert {name: len(each) for name, each in finals.items()} == {f"c-{n}": 1 for n in range(len(requests))}
    answers = [json.loads(finals[f"c-{n}"][0][1]) for n in range(len(requests))]
    assert [answer["content"][0]["text"].split(" [[")[0] for answer in answers[:4]] == [
        "echo: whole",
        "echo: in parts",
        "echo: again",
        "echo: later",
    ]
    assert [answer["code"] for answer in answers[4:]] == ["provider_rejected", "invalid_request"]
    parts = [properties.headers["x-lane-seq"] for properties, _ in replies["c-1"][:-1]]
    assert parts == list(range(len(parts)))
    assert len(parts) > 4
    assert finals["c-2"][0][0].headers["x-lane-attempt"] == 3
    assert {finals[f"c-{n}"][0][0].headers["x-lane-request-id"] for n in range(6)} == {f"m-{n}" for n in range(6)}
