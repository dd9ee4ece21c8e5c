"""Creates adapters for Claude in other clouds (Amazon Bedrock, Google Vertex AI, Microsoft Foundry), with the clients
that Anthropic's SDK has for them.

These clients change the request (see anthropic 2.12, `lib/{bedrock,vertex,foundry}`):

    Bedrock   POST /model/{model}/invoke[-with-response-stream]; the body without `model` and `stream`, with
              `anthropic_version` and `anthropic_beta`; signed (SigV4), or a Bedrock API key as bearer; streams come in
              AWS's event stream (`streams.py`), not as Server-Sent Events
    Vertex    POST …/publishers/anthropic/models/{model}:[stream]rawPredict; the body without `model`, with
              `anthropic_version`; a Google access token as bearer
    Foundry   Anthropic's own API at the resource's URL; the key as `x-api-key` and `api-key`

Credentials for Amazon and Google are read by these vendors' own libraries: from the environment, files, or the
machine's role.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, Unpack

from anthropic import AsyncAnthropicFoundry

from consumers.providers.anthropic import AnthropicProvider, Dialect, Reading, client_options
from consumers.providers.streams import FrameSplitter

MISSING: Final = "needs a package that is not installed; run: pip install {package}"
AMAZON: Final = "boto3"
GOOGLE: Final = "'google-auth[requests]'"


class ExtraMissing(Exception):
    """A provider needs a Python package, which the text names."""


def bedrock(
    *, name: str, region: str, api_key: str | None = None, base_url: str | None = None, **reading: Unpack[Reading]
) -> AnthropicProvider:
    """The adapter for Amazon Bedrock. Without `api_key` (a Bedrock API key) requests are signed; that needs
    `boto3`."""
    url = base_url or f"https://bedrock-runtime.{region}.amazonaws.com"
    errors: tuple[type[Exception], ...] = ()
    if api_key is None:
        errors = (RuntimeError, _imported("botocore.exceptions", AMAZON).BotoCoreError)
        _imported("boto3", AMAZON)
    client_of = import_module("anthropic.lib.bedrock").AsyncAnthropicBedrock
    client = client_of(api_key=api_key, aws_region=region, base_url=url, **client_options(url))
    dialect = Dialect(needs_dict=True, lists_models=False, splitter=FrameSplitter, signing_errors=errors)
    return AnthropicProvider(client, name=name, secret=api_key or "", dialect=dialect, **reading)


def vertex(
    *,
    name: str,
    region: str,
    project: str,
    api_key: str | None = None,
    base_url: str | None = None,
    **reading: Unpack[Reading],
) -> AnthropicProvider:
    """The adapter for Google Vertex AI. Without `api_key` (an access token, which is valid for an hour at most) the
    machine's credentials are used and renewed; that needs `google-auth[requests]`."""
    errors: tuple[type[Exception], ...] = ()
    if api_key is None:
        errors = (RuntimeError, _imported("google.auth.exceptions", GOOGLE).GoogleAuthError)
        _imported("google.auth.transport.requests", GOOGLE)
    url = base_url or _vertex_url(region)
    client_of = import_module("anthropic.lib.vertex").AsyncAnthropicVertex
    client = client_of(region=region, project_id=project, access_token=api_key, base_url=url, **client_options(url))
    dialect = Dialect(needs_dict=True, lists_models=False, signing_errors=errors)
    return AnthropicProvider(client, name=name, secret=api_key or "", dialect=dialect, **reading)


def foundry(*, name: str, api_key: str, base_url: str, **reading: Unpack[Reading]) -> AnthropicProvider:
    """The adapter for Microsoft Foundry, with an API key. `base_url`:
    `https://<resource>.services.ai.azure.com/anthropic`."""
    options = client_options(base_url)
    client = AsyncAnthropicFoundry(api_key=api_key, base_url=base_url, **options)
    return AnthropicProvider(client, name=name, secret=api_key, http=options["http_client"], **reading)


KINDS: Final[dict[str, Callable[..., AnthropicProvider]]] = {
    "anthropic": AnthropicProvider.at,
    "bedrock": bedrock,
    "vertex": vertex,
    "foundry": foundry,
}


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ExtraMissing(MISSING.format(package=package)) from error


def _vertex_url(region: str) -> str:
    match region:
        case "global":
            return "https://aiplatform.googleapis.com/v1"
        case "us" | "eu":
            return f"https://aiplatform.{region}.rep.googleapis.com/v1"
        case _:
            return f"https://{region}-aiplatform.googleapis.com/v1"
