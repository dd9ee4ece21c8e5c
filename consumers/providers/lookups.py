"""Makes calls of Anthropic's API other than Messages (count tokens, list models), which cost no tokens and change
nothing."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import anthropic
import httpx2

from consumers.failures import TIMEOUT, AnswerTooLargeError, TransientError
from consumers.providers.answers import pieces
from consumers.providers.client_options import client_options
from consumers.providers.translation import border, plain

WITHIN_S: Final = 30.0
"""The time limit, in seconds, for a call such as counting tokens or listing the models."""
ANSWER_BYTES: Final = 4 * 1024 * 1024
"""The largest answer, in bytes, that is read from a call such as listing the models. A page of the list of models has
at most a thousand entries, which take fewer bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The provider's response to a call other than Messages: an answer, or an error in Anthropic's format. The body is
    unchanged."""

    status: int
    headers: Mapping[str, str]
    """The response's HTTP headers, by their names in lower case."""
    body: bytes


class Lookups:
    """Makes calls of Anthropic's API other than Messages (count tokens, list models), to Anthropic or a compatible API
    at `base_url`. The API key is kept out of answers and errors."""

    def __init__(self, base_url: str, *, api_key: str) -> None:
        self._client = anthropic.AsyncAnthropic(api_key=api_key, base_url=base_url, **client_options(base_url))
        self._key = api_key

    async def call(
        self, path: str, *, body: bytes | None = None, query: Mapping[str, str], beta: str | None = None
    ) -> Found:
        """Call a path of the API: POST with `body`, or GET if `body` is None. Raises ProviderError if the response is
        neither an answer nor an error in Anthropic's format."""
        options: dict[str, Any] = {"params": dict(query)}
        if beta is not None:
            options["headers"] = {"anthropic-beta": beta}
        try:
            async with asyncio.timeout(WITHIN_S) as limit:
                return await self._call(path, body, options)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TransientError(f"no answer from the provider within {WITHIN_S:g} s", type=TIMEOUT) from error

    async def _call(self, path: str, body: bytes | None, options: dict[str, Any]) -> Found:
        given: dict[str, Any] = {"cast_to": httpx2.Response, "options": options, "stream": True}
        with border(secret=self._key):
            try:
                if body is None:
                    response = await self._client.get(path, **given)
                else:
                    response = await self._client.post(path, content=body, **given)
            except anthropic.APIStatusError as error:
                return self._refusal(error)
            try:
                return Found(status=response.status_code, headers=plain(response.headers), body=await _whole(response))
            finally:
                await response.aclose()

    def _refusal(self, error: anthropic.APIStatusError) -> Found:
        """Return an error response, to be passed on unchanged, if it is in Anthropic's format. Otherwise, and if the
        API key is in its body, raise `error` again."""
        body = error.response.content
        if error.status_code < 400 or not _is_anthropic_error(body) or self._key.encode() in body:
            raise error
        return Found(status=error.status_code, headers=plain(error.response.headers), body=body)

    async def aclose(self) -> None:
        await self._client.close()


async def _whole(response: httpx2.Response) -> bytes:
    found = bytearray()
    async for chunk in pieces(response):
        found += chunk
        if len(found) > ANSWER_BYTES:
            raise AnswerTooLargeError(f"more than {ANSWER_BYTES} bytes")
    return bytes(found)


def _is_anthropic_error(body: bytes) -> bool:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("type") == "error" and isinstance(found.get("error"), dict)
