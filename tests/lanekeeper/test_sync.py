"""The client for programs without an event loop, in threads, against a gateway in the test's own loop."""

import asyncio
import gc
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable

import pytest

from lanekeeper import BrokerUnreachable, ClientMisused, InvalidUrl
from lanekeeper.sync import Client, _forks, _processes
from tests.support.fake_gateway import KEY, FakeGateway
from tests.support.waiting import until

BODY = {"prompt": "hello"}
LANE = "normal.tests.sync"


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway() as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[Client]:
    client = Client(gateway.url, api_key=KEY)
    yield client
    await asyncio.to_thread(client.close)


def opened() -> int:
    """How many clients of this process are open."""
    return len(_processes[_forks.count].opened)


async def test_a_with_block_opens_one_connection_and_closes_it(client: Client, gateway: FakeGateway) -> None:
    def use() -> list[int]:
        client.publish(BODY, key=LANE)  # keeps another one open meanwhile
        counts = [opened()]
        with Client(gateway.url, api_key=KEY) as inside:
            counts.append(opened())
            inside.publish(BODY, key=LANE)
            counts.append(opened())
        return [*counts, opened()]

    first, *others = await asyncio.to_thread(use)
    assert others == [first + 1, first + 1, first]


@pytest.mark.slow
async def test_a_client_that_is_dropped_is_closed(gateway: FakeGateway) -> None:
    client = Client(gateway.url, api_key=KEY)
    await asyncio.to_thread(client.publish, BODY, key=LANE)
    before = opened()
    del client
    gc.collect()
    await until(lambda: opened() < before)


@pytest.mark.parametrize(
    "use",
    [
        lambda client: client.publish(BODY, key=LANE),
        lambda client: list(client.stream(BODY, key=LANE)),
        lambda client: list(client.group("g-1").results()),
    ],
    ids=["publish", "stream", "group"],
)
async def test_a_failed_opening_is_told_and_tried_again_with_the_next_call(use: Callable[[Client], object]) -> None:
    client = Client("http://127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(BrokerUnreachable):
            await asyncio.wait_for(asyncio.to_thread(use, client), 10)
    await asyncio.to_thread(client.close)


@pytest.mark.parametrize(
    "use",
    [lambda client: client.publish(BODY, key=LANE), lambda client: next(client.stream(BODY, key=LANE))],
)
async def test_a_client_that_is_closed_or_in_an_event_loop_is_misused(
    client: Client, use: Callable[[Client], object]
) -> None:
    with pytest.raises(ClientMisused, match=r"await lanekeeper\.Client"):
        use(client)
    client.close()
    with pytest.raises(ClientMisused, match="is closed"):
        await asyncio.to_thread(use, client)


FORKED = """
import os, sys
from lanekeeper.sync import Client

client, own = Client(sys.argv[1], api_key=sys.argv[2]), os.getpid()
client.publish({"prompt": "x"}, key="normal.tests.fork")
if not (child := os.fork()):
    os.getpid = lambda: own
    print(client.publish({"prompt": "x"}, key="normal.tests.fork", message_id="forked"), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.slow
async def test_a_fork_that_gets_the_id_of_a_process_that_has_ended_opens_a_connection_of_its_own(
    gateway: FakeGateway,
) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FORKED, gateway.url, KEY, stdout=PIPE)
    try:
        assert (await asyncio.wait_for(process.communicate(), 10))[0] == b"forked\n"
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.slow
def test_wrong_parameters_are_refused_before_the_first_use() -> None:
    with pytest.raises(InvalidUrl):
        Client("ftp://broker")
