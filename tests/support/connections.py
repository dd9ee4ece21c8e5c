"""Closes connections through the management API."""

import asyncio
from urllib.parse import quote

from tests.support.brokers import Vhost
from tests.support.waiting import STARTED_S, until


async def close_connection(vhost: Vhost, name: str) -> None:
    """Make the broker close the connections of that name, as an administrator can."""
    found: list[str] = []

    async def is_listed() -> bool:
        every = await asyncio.to_thread(vhost.api, "GET", f"vhosts/{vhost.quoted}/connections")
        found[:] = [each["name"] for each in every if each.get("client_properties", {}).get("connection_name") == name]
        return bool(found)

    await until(is_listed, within_s=STARTED_S)  # it may be that of a process that starts
    for each in found:
        await asyncio.to_thread(vhost.api, "DELETE", f"connections/{quote(each, safe='')}")
