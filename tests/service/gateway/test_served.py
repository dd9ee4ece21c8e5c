"""A document is made at its first GET, once, and other calls are answered meanwhile."""

import asyncio
import json
import threading
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from service.gateway.described.served import served

GET = make_mocked_request("GET", "/openapi.json")
WAIT_S = 60.0


class Making:
    """Makes a document when it is let."""

    def __init__(self) -> None:
        self.count = 0
        self.begun = threading.Event()
        self.let = threading.Event()

    def __call__(self) -> dict[str, Any]:
        self.count += 1
        self.begun.set()
        assert self.let.wait(WAIT_S)
        return {"openapi": "3.1.0"}


async def test_it_is_made_at_the_first_get_and_never_again() -> None:
    making = Making()
    making.let.set()
    get = served(making)
    assert making.count == 0

    first, second = await get(GET), await get(GET)

    assert isinstance(first.body, bytes)
    assert json.loads(first.body) == {"openapi": "3.1.0"}
    assert (first.content_type, second.body, making.count) == ("application/json", first.body, 1)


async def test_while_it_is_made_the_loop_goes_on_and_a_client_that_leaves_ends_it_for_no_other() -> None:
    making = Making()
    get = served(making)
    leaves, stays = asyncio.create_task(get(GET)), asyncio.create_task(get(GET))
    assert await asyncio.to_thread(making.begun.wait, WAIT_S)

    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    making.let.set()

    answer = await stays
    assert isinstance(answer.body, bytes)
    assert json.loads(answer.body) == {"openapi": "3.1.0"}
    assert making.count == 1
