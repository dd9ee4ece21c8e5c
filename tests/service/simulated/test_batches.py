"""The simulated batches as the vendor's own client sees them."""

import asyncio
from decimal import Decimal
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types.messages import MessageBatchIndividualResponse

from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.support.faulty_api import FaultyAPI

pytestmark = pytest.mark.slow

MODEL = "claude-haiku-5-5"


def params(prompt: str = "hello", **more: Any) -> Any:
    return {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": prompt}], **more}


def asking(*prompts: str) -> Any:
    return [{"custom_id": f"r-{nth}", "params": params(prompt)} for nth, prompt in enumerate(prompts)]


async def results(sdk: AsyncAnthropic, id: str) -> dict[str, MessageBatchIndividualResponse]:
    return {line.custom_id: line async for line in await sdk.messages.batches.results(id)}


async def test_a_request_fails_alone(sdk: AsyncAnthropic) -> None:
    asked: list[Any] = [
        {"custom_id": "good", "params": params()},
        {"custom_id": "sampling", "params": params(temperature=1)},
        {"custom_id": "streamed", "params": params(stream=True)},
        {"custom_id": "model", "params": {**params(), "model": "claude-next"}},
        {"custom_id": "empty", "params": {}},
        {"custom_id": "told", "params": params("[[fault: overloaded]]")},
        {"custom_id": "late", "params": params("[[fault: expired]]")},
        {"custom_id": "lost", "params": params("[[fault: no_line]]")},
    ]
    batch = await sdk.messages.batches.create(requests=asked)
    ended = await sdk.messages.batches.retrieve(batch.id)

    assert ended.request_counts.to_dict() == {
        "processing": 0, "succeeded": 2, "errored": 5, "canceled": 0, "expired": 1
    }  # fmt: skip
    lines = await results(sdk, batch.id)
    kinds = {id: line.result.type for id, line in lines.items()}
    errors = {id: line.result.error.error.type for id, line in lines.items() if line.result.type == "errored"}
    assert {id for id, kind in kinds.items() if kind == "succeeded"} == {"good"}
    assert {id for id, kind in kinds.items() if kind == "expired"} == {"late"}
    assert errors == {
        "sampling": "invalid_request_error",
        "streamed": "invalid_request_error",
        "model": "not_found_error",
        "empty": "invalid_request_error",
        "told": "overloaded_error",
    }


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([], "at least one"),
        ([*asking("a"), *asking("b")], "r-0 is duplicated"),
        ([{"custom_id": "a b", "params": params()}], "custom_id"),
        ([{"custom_id": "x" * 65, "params": params()}], "custom_id"),
        ([{"custom_id": "a", "params": "b"}], "params"),
        (asking(*"abcd"), "at most 3"),
    ],
)
async def test_a_batch_that_is_wrong_as_a_whole_is_refused(
    sdk: AsyncAnthropic, api: FaultyAPI, wrong: Any, told: str
) -> None:
    api.configure(SimulatedOptions(batches=BatchOptions(requests=3)))

    with pytest.raises(anthropic.BadRequestError, match=told):
        await sdk.messages.batches.create(requests=wrong)

    assert not api.batches.all


async def test_a_batch_takes_its_time_and_a_cancelled_one_has_what_was_done_by_then(
    sdk: AsyncAnthropic, api: FaultyAPI
) -> None:
    api.configure(SimulatedOptions(batches=BatchOptions(processing_s=1e9, cancelling_s=0.05)))
    batch = await sdk.messages.batches.create(requests=asking("[[latency: 1ms]] quick", "slow"))
    running = await sdk.messages.batches.retrieve(batch.id)
    assert (running.processing_status, running.request_counts.processing) == ("in_progress", 2)
    with pytest.raises(anthropic.AnthropicError, match="results_url"):
        await sdk.messages.batches.results(batch.id)
    with pytest.raises(anthropic.BadRequestError):
        await sdk.messages.batches.delete(batch.id)

    cancelled = await sdk.messages.batches.cancel(batch.id)

    assert (cancelled.processing_status, cancelled.cancel_initiated_at is None) == ("canceling", False)
    async with asyncio.timeout(10):
        while (await sdk.messages.batches.retrieve(batch.id)).processing_status != "ended":
            pass
    kinds = {id: line.result.type for id, line in (await results(sdk, batch.id)).items()}
    assert kinds == {"r-0": "succeeded", "r-1": "canceled"}
    assert (await sdk.messages.batches.delete(batch.id)).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        await sdk.messages.batches.retrieve(batch.id)


async def test_the_ledger_bills_answers_alone_and_those_of_batches_by_half(sdk: AsyncAnthropic, api: FaultyAPI) -> None:
    live = (await sdk.messages.create(**params())).usage
    asked = asking("hello", "[[fault: expired]]", "[[fault: invalid]]")
    batch = await sdk.messages.batches.create(requests=asked)
    assert api.ledger.batch_usd == 0
    await sdk.messages.batches.retrieve(batch.id)

    per_token_in, per_token_out = Decimal("0.0000001"), Decimal("0.0000005")
    assert api.ledger.live_usd == live.input_tokens * per_token_in + live.output_tokens * per_token_out
    found = (await results(sdk, batch.id))["r-0"].result
    assert found.type == "succeeded"
    used = found.message.usage
    assert api.ledger.batch_usd == (used.input_tokens * per_token_in + used.output_tokens * per_token_out) / 2
    assert api.ledger.saved_usd == api.ledger.batch_usd
    assert api.stats()["batches"] == {
        "created": 1, "processing": 0, "requests": {"errored": 1, "expired": 1, "succeeded": 1}
    }  # fmt: skip
