"""docs/architecture.md lists the functions that a request passes through, in the order of their calls."""

import re
from pathlib import Path

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.walk import walked

PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")
AT_MOST = 30


def rows(title: str) -> list[tuple[str, list[str]]]:
    """File and functions of each row in the table below this title."""
    below = PAGE.split(f"**{title}**")[1]
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert table is not None
    return [
        (file, re.findall(r"`([\w.]+)`", names))
        for file, names in re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| ([^|]*) \|", table[0], re.MULTILINE)
    ]


async def test_a_fresh_request_calls_the_listed_functions_in_order(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "warm up"}, headers={"x-lane-stream": True})
        with walked() as walk:
            reply = await app.ask(
                {"prompt": "hello", "model": "claude-opus-5-5"},  # another request: its routes are not in the cache
                headers={"x-lane-stream": True},
            )
        assert reply.status == "ok"
        assert len(worker.api.calls) == 2

    listed = rows("A fresh request")
    at, missing = 0, []
    for file, names in listed:
        for name in names:
            found = walk.visits(file, name, start=at)
            if found is None:
                missing.append(f"{file} {name}, after {walk.calls[at]}")
            else:
                at = found
    assert missing == []
    assert len(listed) <= AT_MOST


async def test_a_fresh_request_crosses_no_more_borders_than_docs_architecture_says(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url), requester(vhost.amqp_url) as app:
        await app.ask({"prompt": "warm up"})
        with walked() as walk:
            reply = await app.ask({"prompt": "hello"})
        assert reply.status == "ok"

    told = re.search(r"at most (\d+) borders", PAGE)
    assert told is not None
    assert 60 < len(walk.borders) <= int(told[1]), sorted(walk.borders)
