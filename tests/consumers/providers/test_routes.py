"""Chains: which providers are called for a model, in which order, and what is wrong with a table of them."""

from dataclasses import replace

import pytest

from consumers.job import Chain
from consumers.providers.routes import ProviderModels, Routes, RoutesSpec

OPUS, SONNET, HAIKU = "claude-opus-5-5", "claude-sonnet-5-5", "claude-haiku-5-5"
FIRST = ProviderModels(name="anthropic")
BEDROCK = ProviderModels(name="bedrock", models={SONNET: "eu.anthropic.sonnet", HAIKU: "eu.anthropic.haiku"})


def names(chain: Chain) -> list[str]:
    return [f"{each.provider}:{each.name}" for each in chain.routes]


def test_a_lanes_providers_setting_chooses_and_orders_them() -> None:
    routes = Routes(
        RoutesSpec(providers=(FIRST, BEDROCK), lanes={"batch": ("bedrock",), "critical": ("bedrock", "anthropic")})
    )

    assert names(routes.of("batch", "", HAIKU)) == ["bedrock:eu.anthropic.haiku"]
    assert names(routes.of("critical", "", HAIKU)) == ["bedrock:eu.anthropic.haiku", f"anthropic:{HAIKU}"]
    assert names(routes.of("normal", "", HAIKU)) == [f"anthropic:{HAIKU}", "bedrock:eu.anthropic.haiku"]


def test_fallback_models_come_after_all_providers_of_the_model() -> None:
    routes = Routes(RoutesSpec(providers=(FIRST, BEDROCK), fallbacks={OPUS: SONNET, SONNET: HAIKU}))

    assert names(routes.of("normal", "", OPUS)) == [
        f"anthropic:{OPUS}",
        f"anthropic:{SONNET}",
        "bedrock:eu.anthropic.sonnet",
        f"anthropic:{HAIKU}",
        "bedrock:eu.anthropic.haiku",
    ]


def test_a_fallback_that_lane_or_tenant_may_not_use_is_left_out() -> None:
    spec = RoutesSpec(
        providers=(FIRST,),
        fallbacks={OPUS: SONNET, SONNET: HAIKU},
        lane_models={"critical": {OPUS, HAIKU}},
        tenants={"shop": (OPUS, SONNET)},
    )

    assert names(Routes(spec).of("critical", "", OPUS)) == [f"anthropic:{OPUS}", f"anthropic:{HAIKU}"]
    assert names(Routes(spec).of("normal", "shop", OPUS)) == [f"anthropic:{OPUS}", f"anthropic:{SONNET}"]


def test_a_model_that_the_tenant_may_not_use_is_forbidden_and_the_allowed_are_named() -> None:
    routes = Routes(RoutesSpec(providers=(FIRST,), tenants={"shop": (SONNET, HAIKU)}))

    chain = routes.of("normal", "shop", OPUS)

    assert chain.routes == ()
    assert f"allowed: {HAIKU}, {SONNET}" in chain.forbidden
    assert routes.of("normal", "other", OPUS).routes


def test_a_model_that_no_provider_has_is_forbidden() -> None:
    chain = Routes(RoutesSpec(providers=(BEDROCK,))).of("normal", "", OPUS)

    assert chain.routes == ()
    assert chain.forbidden.startswith(f"no provider of lane normal has model '{OPUS}'; there are {HAIKU}")


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("claude-sonnet-5-5", "sonnet-5-5"),
        ("claude-sonnet-5", "sonnet-5"),
        ("claude-sonnet-5-20260601", "sonnet-5"),
        ("claude-sonnet-4-5-20250929", "sonnet-4"),
        ("claude-sonnet-4-6", "sonnet-4"),
        ("claude-opus-5-5", "opus-5-5"),
        ("claude-opus-5", "opus-5"),
        ("claude-opus-4-8", "opus-4"),
        ("claude-haiku-5-5", "haiku-5-5"),
        ("claude-haiku-4-5-20251001", "haiku-4-5"),
        ("claude-fable-5-2", "fable-5"),
        ("claude-fable-5", "fable-5"),
        ("claude-3-5-haiku-latest", "haiku"),
    ],
)
def test_models_share_limits_as_the_providers_page_says(model: str, line: str) -> None:
    assert Routes(RoutesSpec(providers=(FIRST,))).of("normal", "", model).routes[0].account == f"anthropic/{line}"


def test_the_settings_may_group_models_otherwise_and_a_pooled_provider_has_one_account() -> None:
    pooled = replace(BEDROCK, is_pooled=True)
    routes = Routes(RoutesSpec(providers=(FIRST, pooled), lines={"claude-sonnet-*": "sonnets", "house-*": "house"}))

    assert [each.account for each in routes.of("normal", "", SONNET).routes] == ["anthropic/sonnets", "bedrock/all"]
    assert routes.of("normal", "", "house-7").routes[0].account == "anthropic/house"
    assert routes.of("normal", "", OPUS).routes[0].account == "anthropic/opus-5-5"


def test_model_names_invented_by_requests_share_one_account() -> None:
    spec = RoutesSpec(providers=(FIRST,), lane_models={"batch": {"house-1"}, "normal": None})
    routes = Routes(spec, priced={"priced-1"})

    assert {routes.of("normal", "", f"made-up-{each}").routes[0].account for each in range(600)} == {"anthropic/other"}
    assert routes.of("normal", "", "priced-1").routes[0].account == "anthropic/priced-1"
    assert routes.of("batch", "", "house-1").routes[0].account == "anthropic/house-1"
    assert routes.of("normal", "", SONNET).routes[0].account == "anthropic/sonnet-5-5"


def test_all_errors_in_a_table_are_reported_at_once_by_name() -> None:
    spec = RoutesSpec(
        providers=(BEDROCK, ProviderModels(name="eu", models={"claude-sonet": "x"})),
        lanes={"batch": ("bedrok",)},
        lane_models={"critical": {OPUS}},
        fallbacks={OPUS: SONNET, SONNET: OPUS, HAIKU: HAIKU},
    )

    told = {".".join(place): text for place, text in spec.problems()}

    assert told["lanes.batch.providers"] == "no provider 'bedrok'; there are bedrock, eu"
    assert told["lanes.critical.models"] == f"no provider of the lane has '{OPUS}'"
    assert len(spec.problems()) == len(told)
    assert [each.partition(" goes in a circle")[0] for each in spec.circles()] == [
        f"{OPUS} -> {SONNET} -> {OPUS}",
        f"{HAIKU} -> {HAIKU}",
    ]
