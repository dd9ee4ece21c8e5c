"""Creates adapters for Claude in other clouds (Amazon Bedrock, Google Vertex AI, Microsoft Foundry), with the clients
that Anthropic's SDK has for them.

These clients change the request (see anthropic 2.12, `lib/{bedrock,vertex,foundry}`):

    Bedrock   POST /model/{model}/invoke[-with-response-stream]; the body without `model` and `stream`, with
              `anthropic_version` and `anthropic_beta`; signed (SigV4), or a Bedrock API key as bearer; streams come in
              AWS's event stream (`event_stream.py`), not as Server-Sent Events
    Vertex    POST …/publishers/anthropic/models/{model}:[stream]rawPredict; the body without `model`, with
              `anthropic_version`; a Google access token as bearer
    Foundry   Anthropic's own API at the resource's URL; the key as `x-api-key` and `api-key`

Credentials for Amazon and Google are read by these vendors' own libraries: from the environment, files, or the
machine's role.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from anthropic import AsyncAnthropicFoundry

from consumers.providers.anthropic import AnthropicProvider, Dialect
from consumers.providers.client_options import client_options
from consumers.providers.event_stream import FrameSplitter

MISSING: Final = "needs packages that are not installed; run: pip install 'lanekeeper[{extra}]'"


class ExtraMissing(Exception):
    """A provider cannot be used, because Python packages that it needs are not installed. The error's text names the
    extra of `lanekeeper` to install."""


def bedrock(
    *, name: str, region: str, api_key: str | None = None, base_url: str | None = None, **more: Any
) -> AnthropicProvider:
    """The adapter for Amazon Bedrock. Without `api_key` (a Bedrock API key) requests are signed; that needs
    `lanekeeper[bedrock]`."""
    url = base_url or f"https://bedrock-runtime.{region}.amazonaws.com"
    errors: tuple[type[Exception], ...] = ()
    if api_key is None:
        errors = (RuntimeError, _imported("botocore.exceptions", "bedrock").BotoCoreError)
        _imported("boto3", "bedrock")
    client_of = import_module("anthropic.lib.bedrock").AsyncAnthropicBedrock
    client = client_of(api_key=api_key, aws_region=region, base_url=url, **client_options(url))
    dialect = Dialect(needs_dict=True, splitter=FrameSplitter, signing_errors=errors)
    return AnthropicProvider(client, name=name, secret=api_key or "", dialect=dialect, **more)


def vertex(
    *, name: str, region: str, project: str, api_key: str | None = None, base_url: str | None = None, **more: Any
) -> AnthropicProvider:
    """The adapter for Google Vertex AI. Without `api_key` (an access token, which is valid for an hour at most) the
    machine's credentials are used and renewed; that needs `lanekeeper[vertex]`."""
    errors: tuple[type[Exception], ...] = ()
    if api_key is None:
        errors = (RuntimeError, _imported("google.auth.exceptions", "vertex").GoogleAuthError)
        _imported("google.auth.transport.requests", "vertex")
    url = base_url or _vertex_url(region)
    client_of = import_module("anthropic.lib.vertex").AsyncAnthropicVertex
    client = client_of(region=region, project_id=project, access_token=api_key, base_url=url, **client_options(url))
    dialect = Dialect(needs_dict=True, signing_errors=errors)
    return AnthropicProvider(client, name=name, secret=api_key or "", dialect=dialect, **more)


def foundry(*, name: str, api_key: str, base_url: str, **more: Any) -> AnthropicProvider:
    """The adapter for Microsoft Foundry, with an API key. `base_url`:
    `https://<resource>.services.ai.azure.com/anthropic`."""
    options = client_options(base_url)
    client = AsyncAnthropicFoundry(api_key=api_key, base_url=base_url, **options)
    return AnthropicProvider(client, name=name, secret=api_key, http=options["http_client"], **more)


KINDS: Final[dict[str, Callable[..., AnthropicProvider]]] = {
    "anthropic": AnthropicProvider.at,
    "bedrock": bedrock,
    "vertex": vertex,
    "foundry": foundry,
}


def _imported(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ExtraMissing(MISSING.format(extra=extra)) from error


def _vertex_url(region: str) -> str:
    match region:
        case "global":
            return "https://aiplatform.googleapis.com/v1"
        case "us" | "eu":
            return f"https://aiplatform.{region}.rep.googleapis.com/v1"
        case _:
            return f"https://{region}-aiplatform.googleapis.com/v1"
