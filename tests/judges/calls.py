"""`python -m tests.judges.calls URL < calls.json`: makes calls with Anthropic's Python SDK, sync and
async, and prints what it got.

Runs in the environment of requirements-judges.lock. `calls.js` does the same with the TypeScript SDK.
"""

import asyncio
import sys
from typing import Any

import anthropic

from tests.judges.both import options, print_made


def failed(error: Exception) -> dict[str, Any]:
    found: dict[str, Any] = {"class": type(error).__name__}
    if isinstance(error, anthropic.APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        found |= {"status": error.status_code, "error": body.get("error", error.body)}
        found["retry-after"] = error.response.headers.get("retry-after")
    return found


def made(call: dict[str, Any]) -> Any:
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="sk-ant-any", max_retries=call["retries"])
    given = options(call, "sync")
    found: list[Any] = []
    try:
        for _ in range(call["times"]):
            match call["how"]:
                case "create":
                    found.append(client.messages.create(**given).to_dict())
                case "events":
                    found.extend(event.to_dict() for event in client.messages.create(**given, stream=True))
                case "final":
                    with client.messages.stream(**given) as stream:
                        found.append(stream.get_final_message().to_dict())
                case "count":
                    found.append(client.messages.count_tokens(**given).to_dict())
                case "models":
                    found.extend(model.to_dict() for model in client.models.list())
                case "model":
                    found.append(client.models.retrieve(**given).to_dict())
    except Exception as error:
        found.append(failed(error))
    return found


async def made_async(call: dict[str, Any], free: asyncio.Semaphore) -> Any:
    given = options(call, "async")
    found: list[Any] = []
    async with (
        free,
        anthropic.AsyncAnthropic(base_url=sys.argv[1], api_key="sk-ant-any", max_retries=call["retries"]) as client,
    ):
        try:
            for _ in range(call["times"]):
                match call["how"]:
                    case "create":
                        found.append((await client.messages.create(**given)).to_dict())
                    case "events":
                        async for event in await client.messages.create(**given, stream=True):
                            found.append(event.to_dict())
                    case "final":
                        async with client.messages.stream(**given) as stream:
                            found.append((await stream.get_final_message()).to_dict())
                    case "count":
                        found.append((await client.messages.count_tokens(**given)).to_dict())
                    case "models":
                        found.extend([model.to_dict() async for model in client.models.list()])
                    case "model":
                        found.append((await client.models.retrieve(**given)).to_dict())
        except Exception as error:
            found.append(failed(error))
    return found


print_made(made, made_async)
