"""How far the reading of one request takes you: the pairs of files between which its calls pass."""

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.walk import walked

BORDERS_AT_MOST = 116
"""Pairs of files of which one calls a function of the other, with all helpers, while a fresh request is answered."""


async def test_a_fresh_request_passes_between_few_files(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url), requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "warm up"})
        with walked() as walk:
            reply = await app.ask({"prompt": "hello"})
        assert reply.status == "ok"

    assert 20 < len(walk.borders) <= BORDERS_AT_MOST, sorted(walk.borders)
