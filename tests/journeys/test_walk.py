"""docs/architecture.md says how many borders between files a request crosses."""

import re
from pathlib import Path

from tests.support.house import house
from tests.support.requester import requester
from tests.support.walk import walked

PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")


async def test_a_fresh_request_crosses_no_more_borders_than_the_page_says(vhost) -> None:
    async with house(vhost.amqp_url), requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "warm up"})
        with walked() as walk:
            reply = await app.ask({"prompt": "hello"})
        assert reply.status == "ok"

    told = re.search(r"at most (\d+) borders", PAGE)
    assert told is not None
    assert 60 < len(walk.borders) <= int(told[1]), sorted(walk.borders)
