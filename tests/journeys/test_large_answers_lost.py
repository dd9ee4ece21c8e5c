"""What becomes of an answer beside the broker if something fails: its worker dies, its store is away, it is altered or
gone."""

import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lanekeeper import BodyError, Client
from service.simulated.app import SimulatedAPI
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.http_calls import call
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

TOKENS = 20_000
"""Four bytes each, where the limit is 4 KiB."""
ASKED = {"prompt": f"a long one [[tokens: {TOKENS}]]", "max_tokens": TOKENS}
KEY = "critical.tests.ask"


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"bodies": {"url": f"file://{folder}/bodies", "answers_over_bytes": 4096}, **more}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "calls", "left"), [("after_keep", 2, 2), ("after_store", 1, 1)])
async def test_a_worker_that_dies_before_its_reply_is_replaced(
    vhost: Vhost, tmp_path: Path, place: str, calls: int, left: int
) -> None:
    """Before the outcome is stored, the call is paid again; what was kept then is removed when its time is over."""
    async with SimulatedAPI() as api, requester(vhost.amqp_url) as app:
        environ = environment(
            vhost.amqp_url,
            vhost.management_url,
            ANTHROPIC_BASE_URL=api.base_url,
            LANEKEEPER_GATEWAY__PORT="0",
            LANEKEEPER_BODIES__URL=f"file://{tmp_path}/bodies",
            LANEKEEPER_BODIES__ANSWERS_OVER_BYTES="4096",
        )
        async with lanekeeper(
            "serve", environ={**environ, "LANEKEEPER_FAILPOINTS": f"{place}:1"}, folder=tmp_path
        ) as it:
            await it.ready()
            asked = await app.publish(ASKED, message_id="one")
            await until(lambda: it.has_ended, within_s=60)
        assert not app.finals(asked)
        async with lanekeeper("serve", environ=environ, folder=tmp_path):
            reply = await app.final(asked)
            assert (reply.status, len(api.calls)) == ("ok", calls)
            async with Client(vhost.amqp_url, bodies=f"file://{tmp_path}/bodies") as client:
                assert len((await client.result("one", wait_s=60)).text) > 4 * TOKENS - 100
        assert len(list((tmp_path / "bodies").iterdir())) == left


async def test_while_its_store_is_away_an_answer_that_the_broker_takes_comes_in_the_reply(
    vhost: Vhost, tmp_path: Path
) -> None:
    (tmp_path / "bodies").write_bytes(b"no folder")
    async with serving(vhost.amqp_url, **settings(tmp_path)), requester(vhost.amqp_url) as app:
        reply = await app.ask(ASKED, within_s=60)

    assert (reply.status, "x-lane-body" in reply.headers) == ("ok", False)
    assert len(reply.text) > 4 * TOKENS - 100


async def test_an_answer_that_is_altered_or_gone_is_an_error_and_not_called_again(vhost: Vhost, tmp_path: Path) -> None:
    async with (
        serving(vhost.amqp_url, **settings(tmp_path)) as worker,
        gate(worker.settings) as url,
        Client(vhost.amqp_url, bodies=f"file://{tmp_path}/bodies") as client,
    ):
        await client.request(ASKED, key=KEY, message_id="lost")
        (body,) = (tmp_path / "bodies").iterdir()
        body.write_bytes(b"{}")
        await is_lost(client, url, why="SHA-256")
        body.unlink()
        await is_lost(client, url, why="nothing is there")
        assert len(worker.api.calls) == 1


async def is_lost(client: Client, url: str, *, why: str) -> None:
    with pytest.raises(BodyError, match=why):
        await client.result("lost")
    for path in ("/v1/requests/lost", "/v1/requests/lost/events"):
        found = await call("GET", url + path)
        assert (found.status, why in found["detail"]) == (410, True)
    found = await call("POST", f"{url}/v1/messages", ASKED, idempotency_key="lost")
    assert (found.status, found["type"]) == (410, "error")
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/ws") as ws:
        await ws.send_json({"type": "subscribe", "id": "lost"})
        while (said := json.loads(await ws.receive_str()))["type"] != "problem":
            pass
    assert why in said["problem"]["detail"]


async def test_while_the_store_is_away_a_stored_answer_is_refused_for_a_while_and_names_no_path(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with serving(vhost.amqp_url, **settings(tmp_path)) as worker, gate(worker.settings) as url:
        whole = await call("POST", f"{url}/v1/messages", ASKED, idempotency_key="away")
        folder = tmp_path / "bodies"
        folder.rename(tmp_path / "moved")
        folder.write_bytes(b"no folder")
        away = await call("GET", f"{url}/v1/requests/away")
        assert (away.status, away.headers["retry-after"]) == (503, "2")
        assert str(tmp_path) not in json.dumps(away.body)
        folder.unlink()
        shutil.move(tmp_path / "moved", folder)
        assert (await call("GET", f"{url}/v1/requests/away"))["result"] == whole.body
