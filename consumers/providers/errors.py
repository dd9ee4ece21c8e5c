"""Translates the provider's error responses, and the exceptions of the HTTP client and of Anthropic's SDK, into the
exceptions of `consumers/failures.py`. What an error body means is in `consumers/dialects`."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import anthropic
import httpx2

from consumers.dialects.anthropic import MESSAGES
from consumers.dialects.base import Dialect, ErrorFields, Failure
from consumers.dialects.errors import html_instead
from consumers.failures import (
    TIMEOUT,
    UNREACHABLE,
    AccountError,
    ProviderError,
    RejectedError,
    TransientError,
    read_retry_after_s,
)
from lanekeeper.contract.identity import encodable
from lanekeeper.contract.problems import PROVIDER_ERROR_BYTES

ERROR_BYTES: Final = 64 * 1024
"""No more of an error's body is read."""
_MESSAGE_CHARACTERS: Final = 300
_TYPE_CHARACTERS: Final = 60
_READ_CHARACTERS: Final = 10_000
"""The message may have millions of characters."""
NETWORK_ERRORS: Final = (httpx2.RequestError, aiohttp.ClientError, OSError)
"""What the transport raises if the network fails. Anthropic's client lets it pass, or raises its own with it as the
cause."""
_WRONG_ADDRESS: Final[Mapping[type[Exception], str]] = {
    aiohttp.ClientConnectorCertificateError: "its TLS certificate is not trusted",
    aiohttp.ClientConnectorSSLError: "TLS fails there",
    aiohttp.ClientConnectorDNSError: "the name of its host cannot be resolved",
    aiohttp.ClientHttpProxyError: "the HTTP proxy refuses the way to it",
    aiohttp.NonHttpUrlClientError: "its base URL is no http or https URL",
    aiohttp.InvalidURL: "its base URL is not valid",
    UnicodeError: "the name of its host is not valid",
}
"""The failures of a connection that no request causes, and that last until somebody mends them."""
_FAILURES: Final[Mapping[type[Exception], str]] = {
    aiohttp.ClientProxyConnectionError: "no connection to the HTTP proxy",
    aiohttp.ClientConnectorError: "no connection could be opened",
    aiohttp.ServerDisconnectedError: "the connection was closed",
    aiohttp.ClientPayloadError: "the body is cut or malformed",
    aiohttp.ClientResponseError: "the response is not valid HTTP",
    ConnectionResetError: "the connection was reset",
}
"""The other failures of a connection. Their own texts quote addresses and bytes, so no requester sees these."""


@contextmanager
def translate_errors(*, secret: str) -> Iterator[None]:
    """Translate what Anthropic's SDK raises into the exceptions of `consumers/failures.py`. `secret`: the API key,
    which is removed from error texts; without one, the token with which the request was sent."""
    try:
        yield
    except anthropic.APIStatusError as error:
        sent = error.request.headers
        token = sent.get("x-amz-security-token") or sent.get("authorization", "").removeprefix("Bearer ")
        raise from_response(error.response, MESSAGES, secret=secret or token) from error
    except anthropic.APITimeoutError as error:
        raise TransientError("timed out while connecting to the provider", type=UNREACHABLE) from error
    except anthropic.APIConnectionError as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, (*NETWORK_ERRORS, UnicodeError)):
            raise RejectedError(f"the request cannot be sent ({type(cause).__name__})", type="unsendable") from error
        raise _from_network(cause) from error
    except httpx2.TimeoutException as error:
        raise TransientError("the provider's answer stopped coming", type=TIMEOUT) from error
    except NETWORK_ERRORS as error:
        raise TransientError(f"the provider's answer broke off: {_kind(error)}", type="connection") from error


@contextmanager
def translate_sending() -> Iterator[None]:
    """The same for a request that is sent without an SDK."""
    try:
        yield
    except httpx2.TimeoutException as error:
        raise TransientError("timed out while connecting to the provider", type=UNREACHABLE) from error
    except (*NETWORK_ERRORS, UnicodeError) as error:
        raise _from_network(error) from error


@asynccontextmanager
async def within(seconds: float, *, why: str) -> AsyncIterator[None]:
    """Raise a `TransientError` with the text `why` if the block takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TransientError(why, type=TIMEOUT) from error


def _from_network(error: BaseException | None) -> ProviderError:
    lowest = _lowest(error)
    if (reason := _named(lowest, _WRONG_ADDRESS)) is not None:
        return AccountError(reason, reason=reason, type=UNREACHABLE)
    if isinstance(lowest, aiohttp.ClientConnectorError):
        return TransientError(f"no connection to the provider: {_kind(error)}", type=UNREACHABLE)
    return TransientError(f"the connection to the provider was lost: {_kind(error)}", type="connection")


def _kind(error: BaseException | None) -> str:
    """In our own words: the exception's text may quote the base URL, which may contain a secret, and bytes of the
    response."""
    lowest = _lowest(error)
    return _named(lowest, _WRONG_ADDRESS) or _named(lowest, _FAILURES) or type(lowest).__name__


def _lowest(error: BaseException | None) -> BaseException | None:
    """aiohttp's exception, which the SDK's transport wraps."""
    return error if error is None or isinstance(error, aiohttp.ClientError) else error.__cause__ or error


def _named(error: BaseException | None, names: Mapping[type[Exception], str]) -> str | None:
    return next((name for kind, name in names.items() if isinstance(error, kind)), None)


def from_event(error: ErrorFields, dialect: Dialect, *, secret: str, data: bytes = b"") -> ProviderError:
    """The exception for an error in the middle of a stream. `data`: the JSON of its event."""
    found = from_fields(error, dialect, secret=secret, data=data, where="in the middle of the stream: ")
    found.had_begun = True
    return found


def from_fields(
    error: ErrorFields, dialect: Dialect, *, secret: str, data: bytes = b"", where: str = ""
) -> ProviderError:
    """The exception for an error that came without an HTTP status, from an account that is well. `data`: its JSON."""
    found = dialect.classify(
        Failure(
            status=dialect.status_of(error),
            type=_short(error.type, secret),
            code=_short(error.code, secret),
            message=_line(f"{where}{error.message}", secret),
            request_id=_short(error.request_id, secret) or None,
        )
    )
    if isinstance(found, AccountError) and found.otherwise is not None:
        found = found.otherwise
    found.body = _body_text(data, secret)
    return found


def refuse_html(status: int, headers: Mapping[str, str]) -> None:
    """Raise an error if the answer is a page. `headers`: by name in lower case."""
    if is_html(headers.get("content-type", "")):
        broken = TransientError("the answer is a page of HTML", type="broken_answer")
        raise html_instead(broken.detail, otherwise=broken, status=status, type=broken.type)


def request_id_in(headers: Mapping[str, str]) -> str | None:
    """The provider's own id of a call, of which Anthropic and OpenAI name the header differently."""
    return headers.get("request-id") or headers.get("x-request-id")


def plain(headers: httpx2.Headers) -> dict[str, str]:
    """By names in lower case. Look-ups in a dict are faster than those in `httpx2.Headers`."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers.raw}


def _redirected(response: httpx2.Response) -> ProviderError:
    """A redirect is not followed. Only the host of its target is named, because the rest may contain a secret."""
    try:
        host = urlsplit(response.headers.get("location", "")).hostname or "another path of it"
    except ValueError:
        host = "no address"
    fields: dict[str, Any] = {"status": 502, "type": "redirected"}
    where = f"redirects to {_line(host, '')} ({response.status_code}), which is not followed"
    detail = f"the provider's address {where}: the operator has to set the provider's base URL to where it is"
    otherwise = RejectedError(detail, **fields)
    return AccountError(detail, reason=f"its base URL {where}", otherwise=otherwise, **fields)


def from_response(response: httpx2.Response, dialect: Dialect, *, secret: str) -> ProviderError:
    """The exception for an error response, whose body has been read."""
    status, content = response.status_code, response.content
    if 300 <= status < 400:
        return _redirected(response)
    headers, now_s = plain(response.headers), time.time()
    content_type = headers.get("content-type", "")
    said = dialect.error(_json_in(content))
    if said.message:
        message = _line(said.message, secret)
    elif len(content) >= ERROR_BYTES:
        message = f"an error body of more than {ERROR_BYTES} bytes"
    else:
        message = f"not an error body of its API ({_line(content_type or 'no content type', secret)})"
    found = dialect.classify(
        Failure(
            status=status,
            type=_short(said.type, secret),
            code=_short(said.code, secret),
            message=message,
            retry_after_s=read_retry_after_s(headers, now_s=now_s),
            request_id=request_id_in(headers),
            is_html=is_html(content_type),
        )
    )
    should_retry = headers.get("x-should-retry")
    if should_retry == "true" and isinstance(found, RejectedError):
        found = TransientError(
            found.detail,
            status=found.status,
            type=found.type,
            request_id=found.request_id,
            retry_after_s=found.retry_after_s,
        )
    for each in (found, found.otherwise if isinstance(found, AccountError) else None):
        if each is not None:
            each.body = _body_text(content, secret)
            each.rate = dialect.read_rate(headers, now_s)
            each.is_final = should_retry == "false" and not isinstance(each, AccountError)
    return found


def _json_in(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _body_text(body: bytes, secret: str) -> str:
    """What the requester may see of an error's body."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        if len(body) <= PROVIDER_ERROR_BYTES:
            return ""
        text = body.decode(errors="ignore")
    if secret:
        text = text.replace(secret, "***")  # before the cut, which may be in the middle of it
        if len(body) >= ERROR_BYTES:  # what was read may end so, too
            text = text[: -len(secret)]
    return text[:PROVIDER_ERROR_BYTES]


def is_html(content_type: str) -> bool:
    """Whether it is a page for people."""
    return content_type.lower().lstrip().startswith(("text/html", "application/xhtml"))


def error_line(error: BaseException | None) -> str:
    """An exception on one line, for an operator. API keys are not removed."""
    return _line(f"{type(error).__name__} {error}", "")


def _short(value: object, secret: str) -> str:
    return _line(value, secret)[:_TYPE_CHARACTERS] if isinstance(value, str) else ""


def _line(text: str, secret: str) -> str:
    cut = len(text) > _READ_CHARACTERS
    text = text[:_READ_CHARACTERS]
    if secret:
        text = text.replace(secret, "***")
        if cut:  # the text may have been cut in the middle of a key
            text = text[: -len(secret)]
    return encodable(re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text).strip()[:_MESSAGE_CHARACTERS])
