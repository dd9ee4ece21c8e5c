"""Answers that lie beside the broker: from which stores a gateway fetches them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Unpack

import aiohttp
from pydantic import SecretStr
from typing_extensions import override

from lanekeeper import Client, Final
from lanekeeper.bodies import BodyStore
from lanekeeper.client import Body
from lanekeeper.contract.messages import BodyAddress, Message
from lanekeeper.contract.names import STATUS
from lanekeeper.options import Options
from lanekeeper.replies import final_of
from service.config.bodies_section import BodiesSettings
from service.config.copies import with_store
from service.config.gateway_section import GatewaySettings
from service.config.settings import Settings
from service.gateway.app import Gateway
from service.gateway.server import Server
from tests.support.gate import opened

ASKED = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
ANSWER = b'{"type": "message"}'


class Told(Client):
    """Every request is answered by the same stored answer; nothing is published."""

    def __init__(self, settings: Settings, kept: BodyAddress) -> None:
        super().__init__(settings.broker_url)
        self._kept = kept

    @override
    async def request(
        self,
        body: Body,
        *,
        key: str,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Final:
        return final_of(Message(body=b"", routing_key="", headers={STATUS: "ok", **self._kept.headers}))


@asynccontextmanager
async def answered(kept: BodyAddress, bodies: BodiesSettings, folder: Path) -> AsyncIterator[aiohttp.ClientResponse]:
    settings = Settings(amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"), gateway=GatewaySettings(port=0), bodies=bodies)
    settings = with_store(settings, f"sqlite:///{folder}/store.sqlite")
    async with opened(settings) as store, aiohttp.ClientSession() as session:
        routes = Gateway(settings, Told(settings, kept), store)
        async with (
            Server(routes.reasons, host="127.0.0.1", port=0, routes=routes) as server,
            session.post(f"{server.url}/v1/messages", json=ASKED) as got,
        ):
            yield got


async def test_after_the_url_was_changed_answers_are_fetched_from_the_old_one_if_it_is_allowed(tmp_path: Path) -> None:
    old, new = f"file://{tmp_path}/old", f"file://{tmp_path}/new"
    store = BodyStore(old)
    kept = await store.keep_answer(ANSWER, for_s=1000)
    store.close()

    async with answered(kept, BodiesSettings(url=new, allow=(old, "https://files.example.com")), tmp_path) as got:
        assert (got.status, await got.read()) == (200, ANSWER)
    async with answered(kept, BodiesSettings(url=new), tmp_path) as got:
        assert got.status == 503
        assert "LANEKEEPER_BODIES__ALLOW" in (await got.json())["error"]["message"]
