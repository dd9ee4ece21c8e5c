"""What answers where RabbitMQ's management API is looked for may be something else; a worker goes on without it."""

import pytest
from aiohttp import web

from lanekeeper.contract.problems import AccessRefused, BrokerError
from tests.support.web_server import web_server
from topology.broker.management import Management

CALLS = ("cluster_name", "topology", "bindings", "messages")
OTHERS = (b"<html>", b"{}", b"[5]", b"null", b'[{"a": 1}]', b"[" * 100_000, b"\xff")


@pytest.mark.parametrize("answer", OTHERS, ids=lambda answer: repr(answer[:12]))
async def test_an_answer_of_another_server_is_a_brokers_error(answer: bytes) -> None:
    async def handler(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=answer, content_type="application/json")

    async with web_server(handler) as url:
        for call in CALLS:
            with pytest.raises(BrokerError, match="something else than RabbitMQ's JSON"):
                await getattr(Management(url, "guest", "guest", "/"), call)()


async def test_a_user_that_http_cannot_name_is_refused() -> None:
    with pytest.raises(AccessRefused, match="'crm:eu'"):
        await Management("http://127.0.0.1:1", "crm:eu", "guest", "/").cluster_name()
