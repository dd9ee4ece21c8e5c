"""For comparison with the lanes: one queue, first come first served, with as many workers and the same provider."""

import asyncio
import json
import uuid
from contextlib import AsyncExitStack
from typing import Any

from consumers.failures import ProviderError
from consumers.job import now_ms
from consumers.providers.base import Provider
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.telemetry.tracing import Tracing
from service.demo.load import Ask, Board, Result, board, send
from topology.broker.inbox import Inbox
from topology.codec.request import Request

ATTEMPTS = 4
PAUSE_S = 0.5
"""The pause between two attempts. The worker waits meanwhile, as workers of plain queues do."""


async def run(url: str, provider: Provider, *, workers: int) -> Board:
    """Send the load through one queue that `workers` take from. Its requests go through the same broker and client."""
    scores = board()
    async with AsyncExitStack() as stack:
        publishing = await stack.enter_async_context(Connection(url, name="first come: publish"))
        consuming = await stack.enter_async_context(Connection(url, name="first come: consume"))
        publisher = Publisher(publishing, tracing=Tracing())
        queue = await stack.enter_async_context(Inbox(consuming))
        replies = await stack.enter_async_context(Inbox(consuming))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        answers: dict[str, asyncio.Future[Result]] = {}
        tasks = [group.create_task(_work(queue, publisher, provider)) for _ in range(workers)]
        tasks.append(group.create_task(_listen(replies, answers)))

        async def asking(ask: Ask) -> Result:
            identity = uuid.uuid4().hex
            answer = answers[identity] = asyncio.get_running_loop().create_future()
            body = {"prompt": ask.prompt, "sent_ms": now_ms()}
            message = Message(body=json.dumps(body).encode(), message_id=identity, reply_to=replies.name)
            await publisher.publish(message, exchange="", routing_key=queue.name)
            result: Result = await answer
            return result

        await send(asking, scores)
        for task in tasks:
            task.cancel()
    return scores


async def _work(queue: Inbox, publisher: Publisher, provider: Provider) -> None:
    async for message in queue:
        asked = json.loads(message.body)
        outcome = await _answer(asked, provider, wait_ms=now_ms() - asked["sent_ms"])
        reply = Message(
            body=json.dumps(outcome).encode(), message_id=uuid.uuid4().hex, correlation_id=message.message_id
        )
        await publisher.publish(reply, exchange="", routing_key=message.reply_to or "")


async def _answer(asked: dict[str, Any], provider: Provider, *, wait_ms: int) -> dict[str, Any]:
    request = request_of(asked["prompt"])
    error = ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            answer = await provider.stream(request, timeout_s=60, parts=None)
        except ProviderError as failed:
            error = failed.detail
            await asyncio.sleep(PAUSE_S)
        else:
            text = "".join(block.get("text", "") for block in json.loads(answer.body)["content"])
            return {"text": text, "wait_ms": wait_ms, "attempts": attempt}
    return {"wait_ms": wait_ms, "attempts": ATTEMPTS, "error": error}


async def _listen(replies: Inbox, answers: dict[str, asyncio.Future[Result]]) -> None:
    async for message in replies:
        if (answer := answers.pop(message.correlation_id or "", None)) is not None:
            answer.set_result(Result(**json.loads(message.body)))


def request_of(prompt: str, *, model: str = "claude-haiku-5-5") -> Request:
    """The request as a worker of a plain queue would build it."""
    body = {"model": model, "max_tokens": 1024, "messages": [{"role": "user", "content": prompt}]}
    sent_ms = now_ms()
    return Request(
        id=uuid.uuid4().hex,
        lane="batch",
        app="demo",
        body=json.dumps(body).encode(),
        model=model,
        max_tokens=1024,
        stream=False,
        beta=None,
        sent_ms=sent_ms,
        sent_by="sender",
        due_ms=None,
        deadline_ms=sent_ms + 600_000,
        attempts=0,
    )
