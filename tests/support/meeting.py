"""A worker, an application that uses plain AMQP, and our client, on one virtual host."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lanekeeper import Client
from tests.support.requester import Requester, requester
from tests.support.serving import RunningWorker, serving


@asynccontextmanager
async def meeting(url: str, **settings: Any) -> AsyncIterator[tuple[RunningWorker, Requester, Client]]:
    """`settings`: as for `serving`."""
    async with serving(url, **settings) as worker, requester(url) as app, Client(url) as client:
        yield worker, app, client
