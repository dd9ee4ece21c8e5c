"""`lanekeeper check` asks every provider, and reports wrong keys, addresses and models all at once."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import closing

import pytest

from service import checks as provider_checks
from service.checks import Finding, providers
from service.simulated.app import SimulatedOptions
from tests.support.faulty_api import FaultyAPI
from tests.support.settings import load

KEY = "sk-ant-s3cret"
SONNET, HAIKU = "claude-sonnet-5-5", "claude-haiku-5-5"

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
async def api() -> AsyncIterator[FaultyAPI]:
    async with FaultyAPI(SimulatedOptions(api_key=KEY)) as running:
        yield running


def first(api: FaultyAPI, key: str = KEY) -> dict[str, str]:
    return {"ANTHROPIC_API_KEY": key, "ANTHROPIC_BASE_URL": api.base_url}


def other(name: str, url: str, **more: str) -> dict[str, str]:
    said = {"API_KEY": KEY, "BASE_URL": url, **more}
    return {f"LANEKEEPER_PROVIDERS__{name}__{what}": value for what, value in said.items()}


async def look(env: dict[str, str]) -> dict[str, Finding]:
    found = {each.what: each for each in await providers(load(env=env))}
    assert not any(KEY in each.text for each in found.values())
    return found


async def test_every_provider_is_called_and_each_failure_is_reported_by_name(api: FaultyAPI) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as unused:
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    env = {
        **first(api, "sk-ant-wrong"),
        **other("EU", api.base_url),
        **other("GONE", nobody),
        **other("MAPPED", api.base_url, MODELS=f"{SONNET}=no-such-model,{HAIKU}={HAIKU}"),
        "LANEKEEPER_PROVIDERS__KEYLESS__BASE_URL": "https://a.example",
    }

    found = await look(env)

    assert {name: each.well for name, each in found.items()} == {
        "provider anthropic": False,
        "provider eu": True,
        "provider gone": False,
        "provider keyless": False,
        "provider mapped": False,
    }
    assert "refuses the service's key (401 authentication_error" in found["provider anthropic"].text
    assert found["provider anthropic"].text.endswith("see ANTHROPIC_API_KEY")
    assert f"{nobody}: no connection to the provider" in found["provider gone"].text
    assert found["provider gone"].text.endswith("see LANEKEEPER_PROVIDERS__GONE__BASE_URL")
    assert "has no model 'no-such-model' (404" in found["provider mapped"].text
    assert "see LANEKEEPER_PROVIDERS__MAPPED__MODELS" in found["provider mapped"].text
    assert found["provider keyless"].text.startswith("LANEKEEPER_PROVIDERS__KEYLESS__API_KEY is not set")


async def test_a_provider_that_is_rate_limited_at_the_moment_is_ok(api: FaultyAPI) -> None:
    api.configure(SimulatedOptions(api_key=KEY, faults={"overloaded": 1.0}))

    assert (await look(first(api)))["provider anthropic"].well


async def test_a_provider_that_hangs_is_reported_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_checks, "CALL_WITHIN_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with asyncio.timeout(60):
            found = await look({**other("EU", url), **other("US", url)})

    assert [each.well for each in found.values()] == [False, False]
    assert "within 0.2 s" in found["provider eu"].text


async def test_a_lane_whose_default_model_no_provider_has_is_reported(api: FaultyAPI) -> None:
    found = await look(other("EU", api.base_url, MODELS=f"{SONNET}={SONNET}"))

    assert found["provider eu"].well
    assert not found["lane batch"].well
    assert f"no provider of lane batch has model '{HAIKU}'" in found["lane batch"].text
    assert "LANEKEEPER_LANES__BATCH__MODEL" in found["lane batch"].text


@pytest.mark.slow
async def test_missing_cloud_credentials_are_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/not/there")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/not/there")

    found = await look({"LANEKEEPER_PROVIDERS__AWS__KIND": "bedrock", "LANEKEEPER_PROVIDERS__AWS__REGION": "eu-west-9"})

    assert "no credentials for aws" in found["provider aws"].text
    assert "set LANEKEEPER_PROVIDERS__AWS__API_KEY" in found["provider aws"].text
