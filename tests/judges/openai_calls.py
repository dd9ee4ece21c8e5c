"""`python -m tests.judges.openai_calls URL < calls.json`: makes calls with OpenAI's Python SDK, sync and
async, and prints what it got, like `calls.py`."""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import openai
from pydantic import BaseModel

from tests.judges.both import options, print_made

PAUSE_S = 0.05


class Place(BaseModel):
    at: str


def failed(error: Exception) -> dict[str, Any]:
    found: dict[str, Any] = {"class": type(error).__name__}
    if isinstance(error, openai.APIStatusError):
        found |= {"status": error.status_code, "retry-after": error.response.headers.get("retry-after")}
    if isinstance(error, openai.APIError):
        found |= {"error": error.body, "code": error.code, "type": error.type, "param": error.param}
    return found


def plain(found: Any) -> Any:
    return found.to_dict() if hasattr(found, "to_dict") else found


def made(call: dict[str, Any]) -> Any:
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="sk-any", max_retries=call["retries"]) as client:
        found: list[Any] = []
        try:
            for _ in range(call["times"]):
                found += [plain(each) for each in _sync(client, call["how"], options(call, "sync"))]
        except Exception as error:
            found.append(failed(error))
    return found


def _sync(client: openai.OpenAI, how: str, given: dict[str, Any]) -> list[Any]:
    responses = client.responses
    match how:
        case "chat":
            return [client.chat.completions.create(**given)]
        case "chat events":
            return list(client.chat.completions.create(**given, stream=True))
        case "chat final":
            with client.chat.completions.stream(**given) as stream:
                return [stream.get_final_completion()]
        case "chat parse":
            return [client.chat.completions.parse(**given, response_format=Place).choices[0].message.parsed]
        case "response":
            return [responses.create(**given)]
        case "response events":
            return list(responses.create(**given, stream=True))
        case "response final":
            with responses.stream(**given) as stream:
                return [stream.get_final_response()]
        case "response parse":
            return [responses.parse(**given, text_format=Place).output_parsed]
        case "background":
            return [ended(responses.create(**given, background=True).id, responses.retrieve)]
        case "background events":
            return kinds(list(responses.create(**given, background=True, stream=True)))
        case "background resumed":
            with responses.create(**given, background=True, stream=True) as stream:
                first = next(iter(stream))
            id, after = first.to_dict()["response"]["id"], first.sequence_number
            return kinds([first, *responses.retrieve(id, stream=True, starting_after=after)])
        case "background cancelled":
            id = responses.create(**given, background=True).id
            return [responses.cancel(id).status, responses.retrieve(id).status]
        case "background deleted":
            id = ended(responses.create(**given, background=True).id, responses.retrieve).id
            responses.delete(id)
            return [responses.retrieve(id)]
        case "background chained":
            id = ended(responses.create(**given, background=True).id, responses.retrieve).id
            return [responses.create(**given, previous_response_id=id)]
        case "retrieve":
            return [responses.retrieve(responses.create(**given).id)]
        case "retrieve unknown":
            return [responses.retrieve("resp_nobody")]
        case "embeddings":
            return [client.embeddings.create(**given)]
        case "models":
            return list(client.models.list())
        case "model":
            return [client.models.retrieve(**given)]
        case "elsewhere":
            return [client.moderations.create(input="x")]
    raise ValueError(how)


def ended(id: str, retrieve: Callable[..., Any]) -> Any:
    while (found := retrieve(id)).status in ("queued", "in_progress"):
        time.sleep(PAUSE_S)
    return found


def kinds(events: list[Any]) -> list[Any]:
    """Without the numbers, because those of Lanekeeper count its own steps too; of responses that have no answer yet,
    only that they are in the background."""
    shown = []
    for event in events:
        fields = {**event.to_dict(), "sequence_number": None}
        if event.type in ("response.created", "response.in_progress"):
            fields["response"] = fields["response"]["background"]
        if event.type != "response.queued":
            shown.append(fields)
    numbers = [event.sequence_number for event in events]
    return [*shown, numbers == sorted(set(numbers))]


async def made_async(call: dict[str, Any], free: asyncio.Semaphore) -> Any:
    found: list[Any] = []
    async with (
        free,
        openai.AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="sk-any", max_retries=call["retries"]) as client,
    ):
        try:
            for _ in range(call["times"]):
                found += [plain(each) for each in await _async(client, call["how"], options(call, "async"))]
        except Exception as error:
            found.append(failed(error))
    return found


async def _async(client: openai.AsyncOpenAI, how: str, given: dict[str, Any]) -> list[Any]:
    responses = client.responses
    match how:
        case "chat":
            return [await client.chat.completions.create(**given)]
        case "chat events":
            return [chunk async for chunk in await client.chat.completions.create(**given, stream=True)]
        case "chat final":
            async with client.chat.completions.stream(**given) as stream:
                return [await stream.get_final_completion()]
        case "chat parse":
            parsed = await client.chat.completions.parse(**given, response_format=Place)
            return [parsed.choices[0].message.parsed]
        case "response":
            return [await responses.create(**given)]
        case "response events":
            return [event async for event in await responses.create(**given, stream=True)]
        case "response final":
            async with responses.stream(**given) as events:
                return [await events.get_final_response()]
        case "response parse":
            return [(await responses.parse(**given, text_format=Place)).output_parsed]
        case "background":
            return [await ended_async((await responses.create(**given, background=True)).id, client)]
        case "background events":
            begun = await responses.create(**given, background=True, stream=True)
            return kinds([event async for event in begun])
        case "background resumed":
            async with await responses.create(**given, background=True, stream=True) as begun:
                first = await anext(aiter(begun))
            id = first.to_dict()["response"]["id"]
            rest = await responses.retrieve(id, stream=True, starting_after=first.sequence_number)
            return kinds([first, *[event async for event in rest]])
        case "background cancelled":
            id = (await responses.create(**given, background=True)).id
            return [(await responses.cancel(id)).status, (await responses.retrieve(id)).status]
        case "background deleted":
            id = (await ended_async((await responses.create(**given, background=True)).id, client)).id
            await responses.delete(id)
            return [await responses.retrieve(id)]
        case "background chained":
            id = (await ended_async((await responses.create(**given, background=True)).id, client)).id
            return [await responses.create(**given, previous_response_id=id)]
        case "retrieve":
            return [await responses.retrieve((await responses.create(**given)).id)]
        case "retrieve unknown":
            return [await responses.retrieve("resp_nobody")]
        case "embeddings":
            return [await client.embeddings.create(**given)]
        case "models":
            return [model async for model in client.models.list()]
        case "model":
            return [await client.models.retrieve(**given)]
        case "elsewhere":
            return [await client.moderations.create(input="x")]
    raise ValueError(how)


async def ended_async(id: str, client: openai.AsyncOpenAI) -> Any:
    while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):  # noqa: ASYNC110
        await asyncio.sleep(PAUSE_S)
    return found


print_made(made, made_async)
