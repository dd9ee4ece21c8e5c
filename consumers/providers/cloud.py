"""Creates adapters for Claude in other clouds (Amazon Bedrock, Google Vertex AI, Microsoft Foundry), with the clients
that Anthropic's SDK has for them.

These clients change the request (see anthropic 2.12, `lib/{bedrock,vertex,foundry}`):

    Bedrock   POST /model/{model}/invoke[-with-response-stream]; the body without `model` and `stream`, with
              `anthropic_version` and `anthropic_beta`; signed (SigV4), or a Bedrock API key as bearer; streams come in
              AWS's event stream (`FrameSplitter`), not as Server-Sent Events
    Vertex    POST …/publishers/anthropic/models/{model}:[stream]rawPredict; the body without `model`, with
              `anthropic_version`; a Google access token as bearer
    Foundry   Anthropic's own API at the resource's URL; the key as `x-api-key` and `api-key`

Credentials for Amazon and Google are read by these vendors' own libraries: from the environment, files, or the
machine's role.
"""

import base64
import json
import struct
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, Unpack

from anthropic import AsyncAnthropicFoundry

from consumers.failures import AnswerTooLargeError, TransientError
from consumers.providers.anthropic import AnthropicProvider, CloudApi, Reading
from consumers.providers.extras import imported
from consumers.providers.openai import OpenAIProvider
from consumers.providers.registry import Provider
from consumers.providers.routes import DEFAULT_VERSION
from consumers.providers.transport import client_options
from topology.codec import bounds

AMAZON: Final = "boto3"
GOOGLE: Final = "'google-auth[requests]'"


def bedrock(
    *, name: str, region: str, api_key: str | None = None, base_url: str | None = None, **reading: Unpack[Reading]
) -> AnthropicProvider:
    """The adapter for Amazon Bedrock. It needs `boto3`: to sign requests, if there is no `api_key` (a Bedrock API
    key), and to read streams."""
    url = base_url or f"https://bedrock-runtime.{region}.amazonaws.com"
    imported("botocore.eventstream", AMAZON)
    errors: tuple[type[Exception], ...] = ()
    if api_key is None:
        errors = (RuntimeError, imported("botocore.exceptions", AMAZON).BotoCoreError)
        imported("boto3", AMAZON)
    client_of = import_module("anthropic.lib.bedrock").AsyncAnthropicBedrock
    client = client_of(api_key=api_key, aws_region=region, base_url=url, **client_options(url))
    api = CloudApi(
        needs_dict=True,
        lists_models=False,
        splitter=FrameSplitter,
        signing_errors=errors,
        versions={DEFAULT_VERSION: "bedrock-2023-05-31"},
    )
    return AnthropicProvider(client, name=name, secret=api_key or "", api=api, **reading)


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
        errors = (RuntimeError, imported("google.auth.exceptions", GOOGLE).GoogleAuthError)
        imported("google.auth.transport.requests", GOOGLE)
    url = base_url or _vertex_url(region)
    client_of = import_module("anthropic.lib.vertex").AsyncAnthropicVertex
    client = client_of(region=region, project_id=project, access_token=api_key, base_url=url, **client_options(url))
    versions = {DEFAULT_VERSION: "vertex-2023-10-16"}
    api = CloudApi(needs_dict=True, lists_models=False, signing_errors=errors, versions=versions)
    return AnthropicProvider(client, name=name, secret=api_key or "", api=api, **reading)


def foundry(*, name: str, api_key: str, base_url: str, **reading: Unpack[Reading]) -> AnthropicProvider:
    """The adapter for Microsoft Foundry, with an API key. `base_url`:
    `https://<resource>.services.ai.azure.com/anthropic`."""
    client = AsyncAnthropicFoundry(api_key=api_key, base_url=base_url, **client_options(base_url))
    return AnthropicProvider(client, name=name, secret=api_key, **reading)


KINDS: Final[dict[str, Callable[..., Provider]]] = {
    "anthropic": AnthropicProvider.at,
    "bedrock": bedrock,
    "vertex": vertex,
    "foundry": foundry,
    "openai": OpenAIProvider.at,
    "azure": OpenAIProvider.azure,
}
"""How the provider of each kind in the settings is made."""


def _vertex_url(region: str) -> str:
    match region:
        case "global":
            return "https://aiplatform.googleapis.com/v1"
        case "us" | "eu":
            return f"https://aiplatform.{region}.rep.googleapis.com/v1"
        case _:
            return f"https://{region}-aiplatform.googleapis.com/v1"


_FIELDS: Final = 100
_TYPES: Final[Mapping[str, str]] = {
    "throttlingException": "rate_limit_error",
    "validationException": "invalid_request_error",
    "serviceUnavailableException": "overloaded_error",
    "modelTimeoutException": "timeout_error",
}
"""Bedrock's exceptions in the middle of a stream as Anthropic's error types. All others become `api_error`."""


class FrameSplitter:
    """Splits Amazon's event stream (`application/vnd.amazon.eventstream`), in which Bedrock sends the events of a
    Message, as `EventSplitter` does Server-Sent Events. botocore reads the frames. The payload of an event is
    `{"bytes": "<base64 of Anthropic's event>"}`; an error is a frame with other headers."""

    def __init__(self, max_event_bytes: int) -> None:
        found = import_module("botocore.eventstream")
        self._buffer: Any = found.EventStreamBuffer()
        self._parser_error: type[Exception] = found.ParserError
        self._max_event_bytes = max_event_bytes
        self._since_event_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        self._buffer.add_data(chunk)
        self._since_event_bytes += len(chunk)
        events: list[bytes] = []
        try:
            for frame in self._buffer:
                self._since_event_bytes = 0
                if (event := _event_in(frame)) is not None:
                    events.append(event)
        # a header that is cut raises struct's error, or one of decoding
        except (self._parser_error, ValueError, LookupError, struct.error) as error:
            raise _broken_frames(type(error).__name__) from error
        if self._since_event_bytes > self._max_event_bytes:
            raise AnswerTooLargeError(f"an event of more than {self._max_event_bytes} bytes")
        return events


def _event_in(frame: Any) -> bytes | None:
    headers, payload = frame.headers, frame.payload
    if headers.get(":message-type") in ("exception", "error"):
        code = headers.get(":exception-type") or headers.get(":error-code") or ""
        message = headers.get(":error-message") or _field(payload, "message") or code
        error = {"type": _TYPES.get(code, "api_error"), "message": message}
        return json.dumps({"type": "error", "error": error}).encode()
    if (encoded := _field(payload, "bytes")) is None:
        return None
    return base64.b64decode(encoded, validate=True)


def _field(payload: bytes, name: str) -> str | None:
    if bounds.excess(payload, max_values=_FIELDS) is not None:
        return None
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) else None


def _broken_frames(what: str) -> TransientError:
    return TransientError(f"the stream is broken: a frame cannot be read ({what})", type="broken_stream")
