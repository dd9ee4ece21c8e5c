"""The first call of an adapter is built by the vendor's client; later ones repeat it. Both must be alike."""

import asyncio
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from aiohttp import web

from consumers.failures import ProviderError

from .conftest import Answering, AskedFor, Handler

MESSAGE = b'{"type": "message", "model": "m", "content": [], "stop_reason": "end_turn", "usage": {}}'
ERROR = b'{"type": "error", "error": {"type": "%s", "message": "no", "details": {"error_code": "c"}}}'
Response = tuple[int, bytes, dict[str, str]]


def failing(*answers: Response | None) -> tuple[Sequence[web.BaseRequest], Handler]:
    """A handler that gives these answers in turn; None: it closes the connection without one."""
    asked: list[web.BaseRequest] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        asked.append(request)
        await request.read()
        given = answers[len(asked) - 1]
        if given is None:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(0)
            return web.Response()
        status, body, headers = given
        return web.Response(status=status, body=body, headers=headers)

    return asked, answer


GOOD: Response = (200, MESSAGE, {})


async def test_a_later_call_has_the_headers_of_the_first_and_its_own_body_and_beta(
    answering: Answering, asked: AskedFor
) -> None:
    calls: list[tuple[str, list[tuple[str, str]], bytes]] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        calls.append((str(request.rel_url), sorted(request.headers.items()), await request.read()))
        return web.Response(body=MESSAGE)

    async with answering(answer) as provider:
        for prompt, beta in (("one", "first-beta"), ("and another", None), ("one", "first-beta"), ("one", "other")):
            await provider.stream(asked(prompt, beta=beta), timeout_s=60, parts=None)

    first, without, again, other = calls
    assert again == first
    assert b"and another" in without[2]
    expected = {name: value for name, value in first[1] if name != "anthropic-beta"}
    assert dict(without[1]) == expected | {"Content-Length": str(len(without[2]))}
    assert dict(other[1]) == dict(first[1]) | {"anthropic-beta": "other"}


@pytest.mark.parametrize(
    "failure",
    [
        (400, ERROR % b"invalid_request_error", {"request-id": "req_1"}),
        (429, ERROR % b"rate_limit_error", {"retry-after": "7"}),
        (529, ERROR % b"overloaded_error", {}),
        (500, b"", {}),
        (502, b"<html>bad gateway</html>", {"content-type": "text/html"}),
        (302, b"", {"location": "https://elsewhere.test/v1/messages"}),
        None,
    ],
    ids=["400", "429", "529", "nothing", "html", "redirect", "connection lost"],
)
async def test_a_later_call_raises_the_same_error_as_a_first_one(
    failure: Response | None, answering: Answering, asked: AskedFor
) -> None:
    errors = []
    for answers in ([failure], [GOOD, failure]):
        _, handler = failing(*answers)
        async with answering(handler) as provider:
            for _ in answers[1:]:
                await provider.stream(asked(), timeout_s=60, parts=None)
            with pytest.raises(ProviderError) as failed:
                await provider.stream(asked(), timeout_s=60, parts=None)
            errors.append(failed.value)

    first, later = errors
    assert type(later) is type(first)
    assert vars(later) == vars(first)
    assert later.detail == first.detail


async def test_after_one_answer_the_vendors_client_makes_no_further_call(
    answering: Answering, asked: AskedFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    post = anthropic.AsyncAnthropic.post

    async def counted(client: anthropic.AsyncAnthropic, path: str, **given: Any) -> Any:
        built.append(path)
        return await post(client, path, **given)

    monkeypatch.setattr(anthropic.AsyncAnthropic, "post", counted)
    calls, handler = failing(GOOD, GOOD, GOOD)
    async with answering(handler) as provider:
        for _ in range(3):
            await provider.stream(asked(), timeout_s=5, parts=None)

    assert len(calls) == 3
    assert built == ["/v1/messages"]


async def test_after_a_failed_first_call_the_next_is_built_by_the_vendors_client(
    answering: Answering, asked: AskedFor
) -> None:
    calls, handler = failing((500, b"", {}), GOOD, GOOD)
    async with answering(handler) as provider:
        with pytest.raises(ProviderError):
            await provider.stream(asked(), timeout_s=60, parts=None)
        for _ in range(2):
            await provider.stream(asked(), timeout_s=60, parts=None)

    assert sorted(calls[1].headers.items()) == sorted(calls[2].headers.items())
