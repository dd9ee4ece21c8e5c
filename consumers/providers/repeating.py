"""Calls Anthropic's API with less CPU than Anthropic's client, by repeating the URL and the headers that the client has
made for the first call.

Anthropic's client builds the URL, the headers and a Pydantic model of the options for each call, which takes 40 % of
the CPU of a call. If the API key does not change, calls differ only in their body and in the headers `traceparent` and
`anthropic-beta`. So Anthropic's client makes only the first call. Later calls repeat the URL and the other headers of
the first, use the same HTTP client, and raise the same exceptions as Anthropic's client.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import anthropic
import httpx2

PATH: Final = "/v1/messages"
_LENGTH: Final = "Content-Length"


class Repeating:
    """Makes calls that differ only in their body and a few headers, faster than Anthropic's SDK. `post`: the method of
    the SDK's client that makes the first call; `http`: the HTTP client that the SDK's client uses."""

    def __init__(self, post: Callable[..., Any], http: httpx2.AsyncClient) -> None:
        self._post = post
        self._http = http
        self._url: httpx2.URL | None = None
        self._headers = httpx2.Headers()
        self._extensions: dict[str, Any] = {}

    async def send(self, body: bytes, headers: Mapping[str, str]) -> httpx2.Response:
        """Send one call, and return the response with its body unread. Raises the same exceptions as Anthropic's
        client."""
        if self._url is None:
            response: httpx2.Response = await self._post(
                PATH, cast_to=httpx2.Response, options={"headers": headers}, stream=True, content=body
            )
            self._keep(response.request, except_for={_LENGTH.lower(), *headers})
            return response
        own = httpx2.Headers(self._headers, encoding="ascii")  # without `encoding`, httpx2 detects it at each look-up
        own[_LENGTH] = str(len(body))
        if headers:
            own.update(headers)
        # With `stream` instead of `content` httpx2 does not look for headers to add, and takes a third of the time.
        request = httpx2.Request(
            "POST", self._url, headers=own, stream=httpx2.ByteStream(body), extensions=self._extensions
        )
        request.read()
        try:
            response = await self._http.send(request, stream=True)
        except httpx2.TimeoutException as error:
            raise anthropic.APITimeoutError(request=request) from error
        except Exception as error:
            raise anthropic.APIConnectionError(request=request) from error
        if not response.is_success:
            raise await _failure(response)
        return response

    def _keep(self, sent: httpx2.Request, *, except_for: set[str]) -> None:
        """Keep the URL and the headers of the first call for the later calls, except the headers named in `except_for`
        (in lower case)."""
        self._url, self._extensions = sent.url, dict(sent.extensions)
        self._headers = httpx2.Headers(
            [(name, value) for name, value in sent.headers.raw if name.decode().lower() not in except_for]
        )


async def _failure(response: httpx2.Response) -> anthropic.APIStatusError:
    """The exception that Anthropic's SDK would raise for this error response. The response's body need not be JSON."""
    text = (await response.aread()).decode(errors="replace").strip()
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    return anthropic.APIStatusError(f"status {response.status_code}", response=response, body=body)
