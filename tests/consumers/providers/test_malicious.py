"""Any answer of a provider becomes an answer or one of our failures, and never blocks the event loop for long."""

import asyncio
from collections.abc import Iterator

import pytest

from consumers.dialects.answers import Answer
from consumers.failures import AnswerTooLargeError, ProviderError, TransientError
from consumers.providers.anthropic import AnthropicProvider
from tests.support.malicious import ANSWERS, MaliciousProvider, Stalls, malicious_provider

from .conftest import KEY, AskedFor

pytestmark = pytest.mark.slow

STALL_S = 0.9
"""CPU time, with a margin for a busy machine (0.44 s was measured there); alone under 0.1 s. Without the limits: 1 to 5
s."""
TOO_LARGE = {
    "a huge array": "not streamed, streamed",
    "an array of 12 MiB": "not streamed, streamed",
    "a million keys": "not streamed, streamed",
    "deeply nested": "not streamed, streamed",
    "huge numbers": "not streamed, streamed",
    "a text of 12 MiB": "streamed",
    "quadratic citations": "streamed",
    "quadratic lists": "streamed",
    "a million tiny deltas": "streamed",
    "endless pings": "streamed",
    "a million blocks": "streamed",
    "a tool's input that is a huge array": "streamed",
    "an endless body": "not streamed, streamed",
    "one event of 20 MiB": "not streamed, streamed",
    "one event of a million lines": "streamed",
    "a gzip bomb": "not streamed, streamed",
    "a gzip bomb in a stream": "not streamed, streamed",
}
"""These fail as too large; the others are answers, or fail in their own way."""


@pytest.fixture(scope="module")
def malicious() -> Iterator[str]:
    """The base URL of a malicious provider in its own process."""
    with malicious_provider() as base_url:
        yield base_url


async def outcome(
    url: str, request: object, *, streamed: bool, within_s: float = 4
) -> Answer | ProviderError | TimeoutError:
    """How an attempt ends; or that it had to be stopped."""

    async def forget(_: bytes) -> None: ...

    provider = AnthropicProvider.at(url, api_key=KEY)
    try:
        async with asyncio.timeout(within_s + 1):
            return await provider.stream(request, timeout_s=within_s, parts=forget if streamed else None)  # type: ignore[arg-type]
    except (ProviderError, TimeoutError) as error:
        return error
    finally:
        await provider.aclose()


@pytest.mark.parametrize("streamed", [False, True], ids=["not streamed", "streamed"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_no_answer_blocks_the_event_loop_for_long(
    malicious: str, asked: AskedFor, name: str, streamed: bool
) -> None:
    is_too_large = ("not streamed", "streamed")[streamed] in TOO_LARGE.get(name, "").split(", ")
    with Stalls() as stalls:
        within_s = 240 if is_too_large else 4  # what is too large must be read up to the limit, on any machine
        found = await outcome(malicious, asked(f"[[answer: {name}]]"), streamed=streamed, within_s=within_s)

    assert stalls.longest_s < STALL_S
    assert isinstance(found, AnswerTooLargeError) is is_too_large, found
    if isinstance(found, ProviderError):
        assert len(found.detail) < 500


async def test_names_from_an_answer_are_cut(malicious: str, asked: AskedFor) -> None:
    """They become headers, and headers that are too large close the shared connection."""
    found = await outcome(malicious, asked("[[answer: a model's name of a megabyte]]"), streamed=False)
    error = await outcome(malicious, asked("[[answer: an error's type of 60 KB]]"), streamed=False)

    assert isinstance(found, Answer)
    assert found.model == ""
    assert isinstance(error, ProviderError)
    assert len(error.type) <= 100
    assert len(error.detail) < 500


async def test_a_stream_of_only_comments_ends_as_a_timeout(malicious: str, asked: AskedFor) -> None:
    found = await outcome(malicious, asked("[[answer: a trickle]]"), streamed=True)

    assert isinstance(found, TransientError)
    assert found.type == "timeout"


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nx-internal: s3cret\x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: s3cret\r\n\r\n",
        b"HTTP/1.1 s3cret\r\n\r\n",
        b"s3cret\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\ns3cret\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 6\r\n\r\ns3cret",
        b"",
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_malformed_http_tells_the_requester_no_address_and_no_bytes(
    asked: AskedFor, response: bytes, streamed: bool
) -> None:
    async with MaliciousProvider(lambda _: [response]) as provider:
        found = await outcome(f"{provider.base_url}/s3cret", asked(), streamed=streamed)

    assert isinstance(found, ProviderError)
    assert "s3cret" not in found.detail
    assert "127.0.0.1" not in found.detail
    assert "\\x" not in found.detail
