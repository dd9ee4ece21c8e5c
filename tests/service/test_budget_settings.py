"""Settings of providers, models, prices, caps and the budget: their effect, and which values are refused."""

import json
import re

import pytest

from consumers.prices import Usage
from consumers.spending import Cap
from service.checks import of_models
from service.config.effective import as_json
from tests.support.settings import load, wrong
from topology.codec.bodies import user_hash

SECRET = "s3cret"


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]


PROVIDERS = {
    "LANEKEEPER_PROVIDERS__AWS__KIND": "bedrock",
    "LANEKEEPER_PROVIDERS__AWS__REGION": "eu-central-1",
    "LANEKEEPER_PROVIDERS__AWS__MODELS": "claude-sonnet-5-5=eu.anthropic.claude-sonnet-5-5-v1:0",
    "LANEKEEPER_PROVIDERS__EU_2__API_KEY": SECRET,
    "LANEKEEPER_PROVIDERS__EU_2__BASE_URL": "https://claude.example",
}


def test_wrong_provider_settings_are_reported_by_name_without_keys() -> None:
    told = wrong(
        "[providers.anthropic]\nkind='foundry'",
        env={
            "LANEKEEPER_PROVIDERS__A__KIND": "bedrok",
            "LANEKEEPER_PROVIDERS__B__KIND": "vertex",
            "LANEKEEPER_PROVIDERS__C__API_KEY": SECRET,
            "LANEKEEPER_PROVIDERS__D__KIND": "bedrock",
            "LANEKEEPER_PROVIDERS__D__REGION": "eu",
            "LANEKEEPER_PROVIDERS__D__PROJECT": "p",
            "LANEKEEPER_PROVIDERS__E__MODELS": "claude-sonnet-5-5",
            "LANEKEEPER_PROVIDERS__E__KEY": SECRET,
        },
    )

    assert "LANEKEEPER_PROVIDERS__A__KIND: found 'bedrok', allowed is anthropic or bedrock or vertex or foundry" in told
    assert "LANEKEEPER_PROVIDERS__B__REGION: not set; a provider of kind vertex needs it" in told
    assert "LANEKEEPER_PROVIDERS__B__PROJECT: not set; a provider of kind vertex needs it" in told
    assert "LANEKEEPER_PROVIDERS__C__BASE_URL: not set; a provider of kind anthropic needs it" in told
    assert "LANEKEEPER_PROVIDERS__D__PROJECT: a provider of kind bedrock has none; remove it" in told
    assert "LANEKEEPER_PROVIDERS__E__MODELS: found 'claude-sonnet-5-5', allowed is a table model = model" in told
    assert "LANEKEEPER_PROVIDERS__E__KEY: no such setting; did you mean LANEKEEPER_PROVIDERS__E__API_KEY?" in told
    assert "providers.anthropic.base_url in given.toml: not set; a provider of kind foundry needs it" in told
    assert SECRET not in told
    told = wrong("[providers.Eu]\nbase_url = 'https://a'\napi_key = 'k'\n[providers.anthropic]\nbase_url = 'https://a'")
    assert "providers.anthropic.base_url in given.toml: the name anthropic is taken: by ANTHROPIC_API_KEY" in told
    assert "providers.Eu.api_key in given.toml: 'Eu' is no name" in told


def test_contradicting_settings_are_all_reported_at_once() -> None:
    told = wrong(
        """
        [lanes.batch]
        model = "house-model-1"
        providers = ["nobody"]
        [models.fallbacks]
        "claude-sonnet-5-5" = "claude-haiku-5-5"
        "claude-haiku-5-5" = "claude-sonnet-5-5"
        "claude-sonet" = "claude-haiku-5-5"
        [models.tenants]
        shop = ["claude-opus-9"]
        [caps.tenants."*"]
        usd = 5
        """
    )

    assert told.startswith("3 wrong settings:")
    assert "lanes.batch.providers in given.toml: no provider 'nobody'; there are anthropic" in told
    assert (
        "models.fallbacks in given.toml: claude-sonnet-5-5 -> claude-haiku-5-5 -> claude-sonnet-5-5 goes in a circle"
        in told
    )
    assert "lanes.batch.model in given.toml: 'house-model-1' has no price, and what is spent is capped" in told


def test_configured_prices_are_added_to_the_table_and_have_a_date() -> None:
    settings = load(
        env={
            "LANEKEEPER_PRICES__MODELS": json.dumps(
                {
                    "house-model-1": {"input": 1, "output": 2},
                    "claude-opus-5-5": {"input": 3, "output": 9, "cache_read": 0, "cache_write": 0.5},
                }
            ),
            "LANEKEEPER_PRICES__AS_OF": "2026-11-01",
        }
    )

    prices = settings.prices.table()
    assert prices.source.endswith("as of 2026-11-01")
    million = Usage(input_tokens=1_000_000, cache_read_input_tokens=1_000_000)
    assert prices.cost_usd("house-model-1", million) == pytest.approx(1.1)
    assert prices.cost_usd("claude-opus-5-5", million) == pytest.approx(3)
    assert prices.cost_usd("claude-sonnet-5-5", million) == pytest.approx(2.1)


def test_caps_are_set_for_lanes_tenants_keys_and_users_by_day_week_and_month() -> None:
    settings = load(
        """
        [caps.lanes.batch.week]
        usd = 200
        [caps.tenants.shop]
        usd = 5
        requests = 100
        tokens = 0.5
        month = { usd = 50 }
        [caps.tenants."*"]
        tokens = 1000
        [caps.keys.ci.day]
        usd = 1
        [caps.users."ann@shop.example"]
        month = { tokens = 9 }
        """,
        env={"LANEKEEPER_CAPS__LANES__BATCH__USD": "50"},
    )

    spec = settings.caps.spec()
    assert spec.lanes == {"batch": {"day": Cap(usd=50), "week": Cap(usd=200)}}
    assert spec.tenants == {
        "shop": {"day": Cap(usd=5, requests=100, tokens=0.5), "month": Cap(usd=50)},
        "*": {"day": Cap(tokens=1000)},
    }
    assert spec.keys == {"ci": {"day": Cap(usd=1)}}
    assert spec.users == {user_hash("ann@shop.example"): {"month": Cap(tokens=9)}}
    assert as_json(settings.caps.tenants)["*"] == {"day": {"tokens": 1000}}
    assert spec.in_money
    assert not load().caps.spec().in_money


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LANEKEEPER_PRICES__MODELS", '{"m": {"input": -1, "output": 2}}'),
        ("LANEKEEPER_PRICES__MODELS", '{"m": {"input": 1}}'),
        ("LANEKEEPER_PRICES__MODELS", '{"m": {"input": 1e15, "output": 2}}'),
        ("LANEKEEPER_PRICES__MODELS", "{"),
        ("LANEKEEPER_PRICES__AS_OF", "yesterday"),
        ("LANEKEEPER_CAPS__LANES__BATCH__USD", "0"),
        ("LANEKEEPER_CAPS__TENANTS", '{"shop": {"euro": 1}}'),
        ("LANEKEEPER_CAPS__TENANTS", '{"shop": {}}'),
        ("LANEKEEPER_CAPS__TENANTS", '{"shop": {"usd": 1, "day": {"usd": 2}}}'),
        ("LANEKEEPER_CAPS__TENANTS", '{"shop": {"year": {"usd": 2}}}'),
        ("LANEKEEPER_CAPS__USERS", '{"": {"usd": 2}}'),
        ("LANEKEEPER_CAPS__LANES__BATCH__WEEK", '{"usd": -2}'),
        ("LANEKEEPER_CAPS__TENANTS", '{"shop": {"usd": "nan"}}'),
        ("LANEKEEPER_MODELS__FALLBACKS", "a"),
        ("LANEKEEPER_MODELS__TENANTS", '{"shop": []}'),
    ],
)
def test_a_table_that_cannot_be_read_is_reported_with_what_is_allowed(name: str, value: str) -> None:
    assert re.match(rf"wrong setting: {name}: found .*, allowed is ", wrong(env={name: value}))


def test_a_budget_too_small_for_a_lane_or_an_answer_is_refused_by_name() -> None:
    told = wrong(env={"LANEKEEPER_BUDGET__LANES__BATCH__SHARE": "0", "LANEKEEPER_BUDGET__INPUT_TOKENS_PER_MIN": "999"})
    assert "LANEKEEPER_BUDGET__LANES__BATCH__SHARE: found '0', allowed is a number above 0" in told
    assert "LANEKEEPER_BUDGET__INPUT_TOKENS_PER_MIN: found '999', allowed is a number from 1000" in told

    eu = {"OUTPUT_TOKENS_PER_MIN": "1000", "BASE_URL": "https://eu.example", "API_KEY": "x"}
    assert (
        "LANEKEEPER_PROVIDERS__EU__OUTPUT_TOKENS_PER_MIN: 1000 is less than one answer of lane critical may have (1024"
        in wrong(env={f"LANEKEEPER_PROVIDERS__EU__{name}": value for name, value in eu.items()})
    )


def test_a_key_in_place_of_a_name_is_not_shown() -> None:
    key = "sk-ant-api03-" + "Ab3dE" * 8
    told = wrong(
        env={
            "LANEKEEPER_LANES__BATCH__MODEL": key,
            "LANEKEEPER_MODELS__FALLBACKS": f"{key}={key}",
            "LANEKEEPER_MODELS__TENANTS": json.dumps({"shop": [key]}),
            "LANEKEEPER_PROVIDERS__AWS__KIND": "bedrock",
            "LANEKEEPER_PROVIDERS__AWS__REGION": key,
            "LANEKEEPER_PRICES__MODELS": f"{key}=1,{key}=2",
        }
    )

    assert "Ab3dE" not in told


@pytest.mark.parametrize(
    "name",
    [
        "LANEKEEPER_BUDGET__REQUESTS_PER_MIN",
        "LANEKEEPER_BUDGET__OUTPUT_TOKENS_PER_MIN",
        "LANEKEEPER_PROVIDERS__EU_2__INPUT_TOKENS_PER_MIN",
        "LANEKEEPER_BUDGET__LANES__BATCH__SHARE",
        "LANEKEEPER_CAPS__LANES__BATCH__TOKENS",
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf", "1e400", "true", "many"])
def test_a_limit_in_the_environment_must_be_a_finite_number_above_zero(name: str, value: str) -> None:
    assert wrong(env={**PROVIDERS, name: value}).startswith(f"wrong setting: {name}: found ")


def test_a_model_without_a_price_starts_and_is_reported_with_the_name_that_may_be_meant() -> None:
    settings = load(
        env={
            "LANEKEEPER_LANES__BATCH__MODEL": "claude-sonet-5-5",
            "LANEKEEPER_MODELS__FALLBACKS": "house-1=claude-opus-5",
        }
    )

    found = {each.what: each.text for each in of_models(settings)}

    assert found.keys() == {"model claude-sonet-5-5", "model house-1"}
    assert "LANEKEEPER_PRICES__MODELS; did you mean claude-sonnet-5-5?" in found["model claude-sonet-5-5"]
    assert list(of_models(load())) == []


def test_with_a_cap_in_dollars_every_model_must_have_a_price() -> None:
    env = {
        **PROVIDERS,
        "LANEKEEPER_LANES__BATCH__MODEL": "house-1",
        "LANEKEEPER_PROVIDERS__EU_2__MODELS": "house-1=llama",
        "LANEKEEPER_CAPS__LANES__CRITICAL__USD": "1",
    }

    told = wrong(env=env)
    assert told.startswith(
        "wrong setting: LANEKEEPER_LANES__BATCH__MODEL: 'house-1' has no price, and what is spent is"
    )


@pytest.mark.parametrize("name", ["EU.1", "1", "", "É", "A" * 41])
def test_a_wrong_providers_name_in_the_environment_is_refused(name: str) -> None:
    env = {f"LANEKEEPER_PROVIDERS__{name}__API_KEY": SECRET, f"LANEKEEPER_PROVIDERS__{name}__BASE_URL": "https://a"}

    told = wrong(env=env)
    assert f"LANEKEEPER_PROVIDERS__{name}__API_KEY" in told
    assert "is no name: a to z, 0 to 9" in told
    assert SECRET not in told


def test_a_provider_without_a_key_is_refused_only_in_processes_that_call_providers() -> None:
    env = {"LANEKEEPER_PROVIDERS__EU__BASE_URL": "https://a.example"}

    assert load(env=env).routes_spec().providers[0].name == "eu"
    told = wrong(env=env, for_calls=True)
    assert told == "wrong setting: LANEKEEPER_PROVIDERS__EU__API_KEY: not set; a provider of kind anthropic needs it"
    assert "ANTHROPIC_API_KEY: not set" in wrong(for_calls=True)
    assert "providers.eu.api_key in given.toml: not set" in wrong(
        "[providers.eu]\nbase_url = 'https://a.example'", for_calls=True
    )


@pytest.mark.parametrize("region", ["eu/../x", "example.com/a@b", "EU", "a b"])
def test_a_region_that_would_change_the_providers_host_is_refused(region: str) -> None:
    assert "LANEKEEPER_PROVIDERS__AWS__REGION: found " in wrong(
        env={**PROVIDERS, "LANEKEEPER_PROVIDERS__AWS__REGION": region}
    )


@pytest.mark.parametrize("share", ["in_flight = 1.5", "in_flight = 0", "weight = 0", "weight = 2\nin_flight = 0.5"])
def test_a_tenants_share_is_above_zero_and_its_requests_in_flight_are_a_whole_number(share: str) -> None:
    assert load("[fair.tenants.shop]\nweight = 0.5\nin_flight = 2").fair.tenants["shop"].in_flight == 2

    assert load("[fair.tenants.shop]\nin_flight = 2").fair.tenants["shop"].weight == 1
    told = wrong(f"[fair.tenants.shop]\n{share}")

    assert "numbers above 0: weight, in_flight (a whole one)" in told
