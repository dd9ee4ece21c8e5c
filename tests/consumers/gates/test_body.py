"""A body outside the message is fetched before the call; what cannot be fetched ends the request or defers it."""

import asyncio
import hashlib
import json

import pytest
from typing_extensions import override

from consumers.bodies.fetching import Fetching
from consumers.decoding import Decoding
from consumers.gates.body import BodyGate
from consumers.job import Job
from consumers.outcomes import Buried, Deferred, Dropped, Outcome, Refused
from consumers.parsing import Parsing
from consumers.state.base import Stop
from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyTooLarge
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress
from tests.support.jobs import NOW_MS, Bench, decoded, read, routes_of
from tests.support.virtual_time import virtually

CONTENT = json.dumps({"model": "claude-x", "max_tokens": 7, "messages": [{"role": "user", "content": "hi"}]}).encode()


class Fetches(Fetching):
    """Returns a body, raises an error, or (None) never ends."""

    def __init__(self, found: bytes | Exception | None) -> None:
        self._found = found

    @override
    async def fetch(self, kept: BodyAddress) -> bytes:
        if self._found is None:
            await asyncio.Event().wait()
        if isinstance(self._found, Exception):
            raise self._found
        return self._found or b""


def job(*, deadline_ms: int = 60_000) -> Job:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    headers = {n.BODY: "file:///bodies/one", n.BODY_SHA256: sha256, n.DEADLINE_MS: deadline_ms}
    return read(Bench().job(body=b"", headers={n.SENT_MS: NOW_MS, **headers}))


async def enter(found: bytes | Exception | None, some: Job) -> Outcome | None:
    gate = BodyGate(Fetches(found), Decoding(Parsing(), routes_of("one")), now_ms=lambda: NOW_MS)
    return await gate.enter(some, decoded(some))


async def test_a_fetched_body_is_decoded_as_if_it_had_been_in_the_message() -> None:
    some = job()
    assert await enter(CONTENT, some) is None
    request = decoded(some).request
    assert (request.body, request.model, request.max_tokens) == (CONTENT, "claude-x", 7)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (BodyTooLarge("9 bytes"), "too_large"),
        (BodyError("it is gone"), "invalid_request"),
        (b"{", "invalid_request"),
    ],
)
async def test_a_body_that_can_never_be_used_ends_the_request(found: bytes | Exception, code: str) -> None:
    outcome = await enter(found, job())
    assert isinstance(outcome, Refused | Buried)
    assert outcome.problem.code == code


async def test_while_the_store_is_unavailable_the_body_is_fetched_again_after_two_seconds() -> None:
    outcome = await enter(BodiesUnavailable("down"), job())
    assert isinstance(outcome, Deferred)
    assert (outcome.delay_ms, outcome.reason) == (2000, "body unavailable")


@pytest.mark.parametrize(("deadline_ms", "took_s"), [(20_000, 20), (90_000, 60)])
def test_a_fetch_that_hangs_ends_after_a_minute_or_at_the_deadline(deadline_ms: int, took_s: float) -> None:
    async def story() -> float:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        assert isinstance(await enter(None, job(deadline_ms=deadline_ms)), Deferred)
        return clock() - began_s

    assert virtually(story()) == pytest.approx(took_s, abs=0.1)


async def test_a_cancellation_ends_a_fetch_at_once() -> None:
    some = job()
    fetching = asyncio.create_task(enter(None, some))
    await asyncio.sleep(0)
    some.stop(Stop.CANCELLED)
    assert isinstance(await fetching, Dropped)
