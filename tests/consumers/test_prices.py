"""What calls cost: against genai-prices' own arithmetic, and against the table of LiteLLM, which others keep."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, get_args

import genai_prices
import pytest
from anthropic.types import Model

from consumers.dialects.anthropic_answers import read_usage
from consumers.prices import Price, Prices, Tokens, Usage

LITELLM: dict[str, dict[str, float]] = json.loads((Path(__file__).parent / "litellm_prices.json").read_text())
"""The rows of Anthropic's own API in LiteLLM 1.110.2's `model_prices_and_context_window_backup.json`."""
LIVE = tuple(name for each in get_args(Model) for name in get_args(each))
"""The models that the installed SDK names."""
SMALL = Usage(
    input_tokens=1000, output_tokens=500, cache_read_input_tokens=4000, cache_creation_input_tokens=300,
    cache_creation_1h_tokens=200, web_searches=2,
)  # fmt: skip
LARGE = replace(SMALL, input_tokens=250_000)
NOT_IN_GENAI_PRICES = {"claude-mythos-5-1", "claude-mythos-5", "claude-mythos-preview"}
"""Models of limited access."""
NOT_IN_LITELLM = {"claude-fable-5-2", "claude-mythos-5-2"}
"""Newer than LiteLLM 1.110.2."""
WITHOUT_GEO = {"claude-haiku-4-5", "claude-haiku-4-5-20251001", "claude-sonnet-4-5", "claude-sonnet-4-5-20250929",
               "claude-opus-4-5", "claude-opus-4-5-20251101"}  # fmt: skip
"""They take no `inference_geo` (Anthropic's pricing page), so no usage of theirs names one."""
LONG_PROMPTS_DIFFER = {"claude-sonnet-4-5", "claude-sonnet-4-5-20250929"}
"""Above 200,000 tokens: genai-prices has the band that Anthropic's pricing page lists, LiteLLM has dropped it."""


def modified() -> Iterator[tuple[str, Usage]]:
    for size, is_fast, geo, is_batch in itertools.product((SMALL, LARGE), (False, True), ("", "us"), (False, True)):
        if not (is_fast and is_batch):  # the API refuses `speed` in a batch
            usage = replace(size, is_fast=is_fast, geo=geo, is_batch=is_batch)
            yield f"{size.input_tokens}{' fast' * is_fast}{f' {geo}' * bool(geo)}{' batch' * is_batch}", usage


@pytest.mark.parametrize("model", LIVE)
def test_every_live_model_has_a_price(model: str) -> None:
    assert Prices().has(model)


@pytest.mark.parametrize("model", [each for each in LIVE if each not in NOT_IN_GENAI_PRICES])
def test_every_live_model_costs_what_genai_prices_computes(model: str) -> None:
    for _, usage in modified():
        geo = 1.1 if usage.geo else 1.0
        context = {"speed": "fast"} if usage.is_fast else {"processing": "batch"} if usage.is_batch else {}
        given = genai_prices.Usage(
            input_tokens=usage.prompt,
            output_tokens=usage.output_tokens,
            cache_read_tokens=usage.cache_read_input_tokens,
            cache_write_tokens=usage.cache_creation_input_tokens,
            cache_write_1h_tokens=usage.cache_creation_1h_tokens,
        )
        tokens = genai_prices.calc_price(given, model, provider_id="anthropic", price_context=context)
        searches = genai_prices.calc_price(
            genai_prices.Usage(web_searches=usage.web_searches), model, provider_id="anthropic"
        )

        expected = float(tokens.total_price) * geo + float(searches.total_price)
        assert Prices().cost_usd(model, usage) == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize("model", [each for each in LIVE if each not in NOT_IN_LITELLM])
def test_every_live_model_costs_what_litellm_lists(model: str) -> None:
    row = LITELLM[model]

    def listed(name: str, usage: Usage) -> float:
        above = f"{name}_above_100k_tokens"
        return row[above] if usage.prompt > 100_000 and above in row else row[name]

    compared = 0
    for what, usage in modified():
        if (usage.is_fast and "times_fast" not in row) or (usage.geo and model in WITHOUT_GEO):
            continue
        if usage.prompt > 200_000 and model in LONG_PROMPTS_DIFFER:
            continue
        for_5m = usage.cache_creation_input_tokens - usage.cache_creation_1h_tokens
        tokens = (
            usage.input_tokens * listed("input_cost_per_token", usage)
            + usage.output_tokens * listed("output_cost_per_token", usage)
            + usage.cache_read_input_tokens * listed("cache_read_input_token_cost", usage)
            + for_5m * listed("cache_creation_input_token_cost", usage)
            + usage.cache_creation_1h_tokens * listed("cache_creation_input_token_cost_above_1hr", usage)
        )
        factor = (row["times_fast"] if usage.is_fast else 1) * (row["times_us"] if usage.geo else 1)
        factor *= 0.5 if usage.is_batch else 1
        expected = tokens * factor + usage.web_searches * 0.01
        assert Prices().cost_usd(model, usage) == pytest.approx(expected, rel=0.001), what
        compared += 1
    assert compared >= 2


def test_each_inference_of_a_call_costs_the_price_of_its_own_model() -> None:
    usage = read_usage(
        {
            "input_tokens": 10,
            "output_tokens": 20,
            "iterations": [
                {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3500},
                {"type": "message", "input_tokens": 10, "output_tokens": 20, "model": "claude-sonnet-5-5"},
                {"type": "advisor_message", "input_tokens": 1000, "output_tokens": 100, "model": "claude-opus-5-5"},
            ],
        }
    )

    expected = (180_010 * 2 + 3520 * 10 + 1000 * 4 + 100 * 20) / 1e6
    assert Prices().cost_usd("claude-sonnet-5-5", usage) == pytest.approx(expected)


def test_a_call_with_a_model_of_unknown_price_has_no_price_and_never_none_at_all() -> None:
    usage = Usage(iterations=(("", Tokens(input_tokens=1)), ("claude-new-9", Tokens(input_tokens=1))))

    assert Prices().cost_usd("claude-sonnet-5-5", usage) is None
    assert Prices().cost_usd("claude-new-9", Usage()) is None
    assert not Prices().has("claude-new-9")


def test_what_an_answer_says_of_how_it_was_served_is_on_the_bill() -> None:
    usage = read_usage(
        {
            "input_tokens": 5,
            "output_tokens": 7,
            "cache_creation_input_tokens": 100,
            "cache_creation": {"ephemeral_5m_input_tokens": 60, "ephemeral_1h_input_tokens": 40},
            "server_tool_use": {"web_search_requests": 3, "web_fetch_requests": 1},
            "service_tier": "batch",
            "speed": "fast",
            "inference_geo": "us",
        }
    )

    assert usage == Usage(
        input_tokens=5, output_tokens=7, cache_creation_input_tokens=100, cache_creation_1h_tokens=40,
        web_searches=3, is_batch=True, is_fast=True, geo="us",
    )  # fmt: skip


@pytest.mark.parametrize(
    "odd",
    [
        {
            "server_tool_use": 3,
            "cache_creation": [],
            "iterations": {"type": "message"},
            "speed": 1,
            "inference_geo": [],
        },
        {"server_tool_use": {"web_search_requests": -1}, "iterations": [None, 7, "x"]},
        {"cache_creation": {"ephemeral_1h_input_tokens": 10**9}, "iterations": None},
    ],
)
def test_odd_counts_cost_nothing(odd: dict[str, Any]) -> None:
    assert Prices().cost_usd("claude-sonnet-5-5", read_usage(odd)) == 0


def test_a_batch_saves_half_of_what_its_tokens_cost_and_nothing_of_its_searches() -> None:
    batched = replace(SMALL, is_batch=True)
    usd, live_usd = Prices().cost_usd("claude-opus-5-5", batched), Prices().cost_usd("claude-opus-5-5", SMALL)

    assert usd is not None
    assert live_usd is not None
    assert usd - 0.02 == pytest.approx((live_usd - 0.02) / 2)
    assert Prices().saved_usd("claude-opus-5-5", batched) == pytest.approx(live_usd - usd)
    assert Prices().saved_usd("claude-opus-5-5", SMALL) == 0
    assert Prices(batch=0.8).cost_usd("claude-opus-5-5", batched) == pytest.approx((live_usd - 0.02) * 0.8 + 0.02)


def test_a_price_of_ones_own_holds_over_the_table_and_what_it_leaves_out_follows_from_its_input() -> None:
    prices = Prices({"claude-opus-5-5": Price(10, 20), "house": Price(1, 2, 0, 0.5, 3)})
    expected = 1000 * 10 + 500 * 20 + 4000 * 1 + 100 * 12.5 + 200 * 20

    assert prices.cost_usd("claude-opus-5-5", SMALL) == pytest.approx(expected / 1e6 + 0.02)
    assert prices.cost_usd("house", SMALL) == pytest.approx((1000 + 500 * 2 + 100 * 0.5 + 200 * 3) / 1e6 + 0.02)


def test_bedrock_costs_what_the_endpoint_of_the_models_name_costs() -> None:
    million = Usage(input_tokens=1_000_000)

    assert Prices().cost_usd("claude-sonnet-5-5", million, name="eu.anthropic.claude-sonnet-5-5") == pytest.approx(2.2)
    assert Prices().cost_usd("claude-sonnet-5-5", million, name="global.anthropic.claude-sonnet-5-5") == 2
    assert Prices().cost_usd("claude-sonnet-5-5", million, name="claude-sonnet-5-5@20260901") == 2


def test_the_prices_of_a_day_are_used_where_one_is_set() -> None:
    long = Usage(input_tokens=300_000)
    today = Prices(as_of=datetime.now(UTC).date())

    assert Prices(as_of=date(2026, 3, 1)).cost_usd("claude-opus-4-6", long) == pytest.approx(3)
    assert today.cost_usd("claude-opus-4-6", long) == Prices().cost_usd("claude-opus-4-6", long) == pytest.approx(1.5)
