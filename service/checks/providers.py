"""Checks each provider for `lanekeeper check`: its key, whether it is reachable, and the models that lanes call.

Each check makes a call for one token, in the same way as a worker. The result of such a call shows whether key, address
and model are right, and every kind of provider supports such calls."""

import asyncio
from dataclasses import dataclass

from consumers.failures import OverloadedError, ProviderError, RateLimitedError, RejectedError, SpendLimitError
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.routes import Routes
from lanekeeper.contract.problems import SettingsError
from service.config.budget_sections import FIRST
from service.config.masking import mask_url
from service.config.names import variable
from service.config.settings import Settings
from service.worker.open_providers import key_setting, open_provider
from topology.codec.request import unpublished

WITHIN_S = 10.0
"""How many seconds `lanekeeper check` waits for the answer of a provider."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one of the checks that `lanekeeper check` makes."""

    what: str
    well: bool | None
    """Whether the check passed. None: the check does not apply here, or its result is only a warning; neither counts as
    a failure."""
    text: str


async def providers(settings: Settings) -> list[Finding]:
    """Call all providers at the same time, each with its models. Returns a result for each provider, and in addition a
    failure for each lane whose default model no provider has."""
    spec = settings.routes_spec()
    models_of: dict[str, set[str]] = {provider.name: set() for provider in spec.providers}
    without_route: list[Finding] = []
    routes = Routes(spec)
    for provider in spec.providers:  # a provider without any lane's default model is checked with a model of its table
        models_of[provider.name].update(list((provider.models or {}).values())[:1])
    for lane in settings.lane_specs():
        chain = routes.of(lane.name, "", lane.model)
        for route in chain.routes:
            models_of[route.provider].add(route.name)
        if chain.forbidden:
            text = f"{chain.forbidden}; set {variable(('lanes', lane.name, 'model'))}, or add it to a provider's models"
            without_route.append(Finding(f"lane {lane.name}", False, text))
    found = await asyncio.gather(*(_provider(settings, name, sorted(models)) for name, models in models_of.items()))
    return [*found, *without_route]


async def _provider(settings: Settings, name: str, models: list[str]) -> Finding:
    what = f"provider {name}"
    try:
        provider = open_provider(settings, name)
    except SettingsError as error:
        return Finding(what, False, str(error))
    try:
        results = await asyncio.gather(*(_trouble(settings, provider, model) for model in models))
    finally:
        await provider.aclose()
    if troubles := [trouble for trouble in dict.fromkeys(results) if trouble is not None]:
        return Finding(what, False, "; ".join(troubles))
    return Finding(what, True, f"{_shown(settings, name)} takes the key and answers as {', '.join(models)}")


async def _trouble(settings: Settings, provider: AnthropicProvider, model: str) -> str | None:
    """Call a provider's model for an answer of one token. Returns why the call failed; None if it worked, or if the
    error is temporary."""
    name = provider.name
    try:
        async with asyncio.timeout(WITHIN_S):
            await provider.stream(unpublished("1", model=model, max_tokens=1), timeout_s=WITHIN_S, parts=None)
    except TimeoutError:
        return f"{_shown(settings, name)}: no answer within {WITHIN_S:g} s; see {_address_setting(settings, name)}"
    except (RateLimitedError, OverloadedError):
        return None  # the key is right, and the provider is only busy at the moment
    except RejectedError as error:
        if error.status in (401, 403):
            return f"{_shown(settings, name)} refuses the key ({error.detail}): see {key_setting(name)}"
        if error.status == 404:
            return f"{_shown(settings, name)} has no model {model!r} ({error.detail}): see {_models_setting(name)}"
        return f"{_shown(settings, name)} refuses a request for {model!r}: {error.detail}"
    except SpendLimitError as error:
        return f"{_shown(settings, name)} answers no more: {error.detail}; raise the limit there"
    except ProviderError as error:
        if error.type == "credentials":
            return f"{error.detail}; set {key_setting(name)}, or what the house's own library looks for"
        return f"{_shown(settings, name)}: {error.detail}; see {_address_setting(settings, name)}"
    return None


def _shown(settings: Settings, name: str) -> str:
    """A provider's address as error messages show it, without secrets."""
    if name == FIRST:
        return settings.provider
    section = settings.providers[name]
    if section.base_url is not None:
        return mask_url(section.base_url.get_secret_value())
    return f"{section.kind} in {section.region}"


def _models_setting(name: str) -> str:
    lanes = "LANEKEEPER_LANES__<LANE>__MODEL"
    return lanes if name == FIRST else f"{variable(('providers', name, 'models'))}, {lanes}"


def _address_setting(settings: Settings, name: str) -> str:
    if name == FIRST:
        return "ANTHROPIC_BASE_URL"
    return variable(("providers", name, "region" if settings.providers[name].base_url is None else "base_url"))
