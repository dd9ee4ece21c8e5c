"""Sends a call as the vendor's client sent the one before it: the same address and headers, another body.

The client builds each call anew (address, headers, a model of the options), which takes 40 % of the CPU of a call. With
a key that does not change, only body, trace and beta differ from call to call. So the client makes the first call; the
ones after it repeat what it sent, over the same HTTP client, and raise the same exceptions.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import anthropic
import httpx2

PATH: Final = "/v1/messages"
_LENGTH: Final = "Content-Length"


class Repeating:
    """Calls that differ in their body and a few headers. `post`: the client's own; `http`: the HTTP client it uses."""

    def __init__(self, post: Callable[..., Any], http: httpx2.AsyncClient) -> None:
        self._post = post
        self._http = http
        self._url: httpx2.URL | None = None
        self._headers = httpx2.Headers()
        self._extensions: dict[str, Any] = {}

    async def send(self, body: bytes, headers: Mapping[str, str]) -> httpx2.Response:
        """Send one call and return the answer with its body unread. Raises what the vendor's client raises."""
        if self._url is None:
            response: httpx2.Response = await self._post(
                PATH, cast_to=httpx2.Response, options={"headers": headers}, stream=True, content=body
            )
            self._keep(response.request, but={_LENGTH.lower(), *headers})
            return response
        own = httpx2.Headers(self._headers, encoding="ascii")  # otherwise httpx detects it at each look-up
        own[_LENGTH] = str(len(body))
        if headers:
            own.update(headers)
        # given a stream, httpx2 does not look for headers to add: a third of the time
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

    def _keep(self, sent: httpx2.Request, *, but: set[str]) -> None:
        self._url, self._extensions = sent.url, dict(sent.extensions)
        self._headers = httpx2.Headers(
            [(name, value) for name, value in sent.headers.raw if name.decode().lower() not in but]
        )


async def _failure(response: httpx2.Response) -> anthropic.APIStatusError:
    """The exception that the vendor's client would raise for this error answer; its body may be JSON or not."""
    text = (await response.aread()).decode(errors="replace").strip()
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    return anthropic.APIStatusError(f"status {response.status_code}", response=response, body=body)
